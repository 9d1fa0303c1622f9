"""A model file with static inputs and nothing else changed, for runtimes that look at it as it is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from harness.graph.cleaning.read import read_model
from harness.graph.cleaning.shapes import fix_inputs
from harness.graph.load import write

__all__ = ["with_static_inputs"]


def with_static_inputs(path: Path, shapes: Mapping[str, str], target: Path) -> Path:
    """The file itself where no shapes are given and none is needed, else a copy of it, weights included.

    A file that is no ONNX model is left to whoever takes it.

    Args:
        shapes: Of dynamic inputs, by name, for instance "1x3x224x224".
        target: Where the copy is written.

    Raises:
        UserError: An input stays dynamic (the text names the remedy), or a shape does not fit.
    """
    if not shapes:
        with suppress(DecodeError):
            fix_inputs(onnx.load(path, load_external_data=False).graph, {}, str(path))
        return path
    proto = read_model(path, str(path))[0]
    fix_inputs(proto.graph, shapes, str(path))
    return write(proto, target)
