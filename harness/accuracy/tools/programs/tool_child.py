"""Protocol of the child programs: they read a request file and write a model file and the time that the tool took.

The programs also run in separate environments of tools, so they import only the standard library, NumPy and the tool.
A request is a JSON object:
    tool            name of the function to call
    model           float ONNX file
    output          file to write
    data            .npz file: array "I_J" is batch I of input J
    names, count    names of the inputs in the order of J, and the number of batches
    reason          file for the message of an exception
    seconds         file for the seconds that the tool took
Other keys are options of the tools.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np


class UnsupportedOption(ValueError):
    """Option that a tool does not offer."""


def iter_batches(request: Mapping[str, Any], start: int = 0, end: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the calibration batches of a request from one number to before another: input arrays by name."""
    with np.load(request["data"], allow_pickle=False) as arrays:
        for index in range(start, request["count"] if end is None else end):
            yield {name: arrays[f"{index}_{slot}"] for slot, name in enumerate(request["names"])}


def serve_request(tools: Mapping[str, Callable[[dict[str, Any]], None]], request_path: str) -> None:
    """Run the tool that a request names; write its seconds to the file `seconds`, or an error to `reason`.

    Args:
        tools: Functions by the names of the tools.
        request_path: Path of the request file, in JSON, which names these files.
    """
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        words = " ".join(str(error).split()) or "no message"
        said = words if issubclass(kind, UnsupportedOption) else f"{kind.__name__}: {words}"
        Path(request["reason"]).write_text(said, encoding="utf-8")
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = record
    started_s = time.monotonic()
    tools[request["tool"]](request)
    Path(request["seconds"]).write_text(f"{time.monotonic() - started_s:.2f}", encoding="ascii")
