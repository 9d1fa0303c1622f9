"""Program of the child process of `harness.run.search.external.modelopt`: ModelOpt's workflow.

It runs in a separate process for three reasons: the workflow does not return between models; it uses the global random
state and a global benchmark; and it iterates over sets of strings, so only a fixed PYTHONHASHSEED makes it repeatable.
"""

from __future__ import annotations

import json
import random
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np

from harness.graph.io.files import copy_model


class _Benchmark:
    """Replacement of ModelOpt's `Benchmark` that sends each model to the driver and waits for its latency."""

    def __init__(self, connection: TextIO) -> None:
        self._connection = connection
        self._count = 0

    def run(self, path_or_bytes: str | bytes, log_file: str | None = None, flush_timing_cache: bool = False) -> float:
        """Return the median latency in milliseconds, or ModelOpt's value for a failure."""
        model = Path(f"model-{self._count}.onnx")
        self._count += 1
        if isinstance(path_or_bytes, bytes):
            model.write_bytes(path_or_bytes)
        else:
            copy_model(Path(path_or_bytes), Path(), model.name)  # with its external data, if any
        _send_message(self._connection, {"model": str(model)})
        answer = self._connection.readline()
        if not answer:
            raise SystemExit("the driver has ended")
        latency_ms: float | None = json.loads(answer)["latency_ms"]
        return float("inf") if latency_ms is None else latency_ms


def main(request_path: str, descriptor: str) -> None:
    """Run the workflow of a request file; an exception's message is sent to the driver."""
    request: dict[str, Any] = json.loads(Path(request_path).read_text(encoding="utf-8"))
    with socket.socket(fileno=int(descriptor)) as ours:
        connection = ours.makefile("rw", encoding="utf-8", newline="\n")

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        words = " ".join(str(error).split()) or "no message"
        _send_message(connection, {"failed": f"{kind.__name__}: {words}"[:500]})
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = record
    from modelopt.onnx.quantization.autotune import workflows

    random.seed(request["seed"])
    np.random.seed(request["seed"])  # ModelOpt draws from the global state, if from this one at all
    workflows._benchmark_instance = _Benchmark(connection)
    workflows.region_pattern_autotuning_workflow(
        request["model"],
        output_dir=Path("out"),
        num_schemes_per_region=request["schemes_per_region"],
        quant_type=request["precision"],
        qdq_baseline_model=request["qdq_baseline"],
    )
    _send_message(connection, {"through": True})


def _send_message(connection: TextIO, message: dict[str, Any]) -> None:
    connection.write(json.dumps(message) + "\n")
    connection.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
