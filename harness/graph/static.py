"""A model file with static inputs and nothing else changed, for runtimes that look at it as it is."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from harness.graph.cleaning.read import read_model
from harness.graph.cleaning.shapes import fix_inputs, has_dynamic_inputs
from harness.graph.cleaning.sizes import Sizes
from harness.graph.load import write

__all__ = ["with_static_inputs"]


def with_static_inputs(path: Path, sizes: Sizes, target: Path) -> Path:
    """Return the file itself where its inputs are static and no size is given, else a copy with static inputs.

    A file that is no ONNX model is left to whoever takes it.

    Args:
        sizes: Of dynamic inputs.
        target: Where the copy is written.

    Raises:
        UserError: An input stays dynamic (the text names the remedy), or a size does not fit.
    """
    if not (sizes.shapes or sizes.dims):
        try:
            if not has_dynamic_inputs(onnx.load(path, load_external_data=False).graph):
                return path
        except DecodeError:
            return path
    proto = read_model(path, str(path))[0]
    fix_inputs(proto, sizes, str(path))
    return write(proto, target)
