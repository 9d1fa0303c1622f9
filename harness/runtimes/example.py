"""Example of a runtime, for authors: ONNX Runtime without graph optimizations, timed by the host's clock.

`backends: ["harness.runtimes.example:PlainBenchmarker"]` in an experiment uses it, with `--trust-plugins`.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from harness.base.errors import BuildFailed, MeasureFailed
from harness.graph.segmented_run import open_reference_session
from harness.measure.sampling import make_fixed_inputs
from harness.plugins.api import Array, Artifact, Candidate, Capabilities
from harness.runtimes.host_clock import parse_dtype, require_static_shapes, run_session, time_calls, translate_errors


class PlainProbe:
    """Session that is timed on random inputs."""

    def __init__(self, path: Path) -> None:
        self._session = open_reference_session(str(path))
        inputs = self._session.get_inputs()
        require_static_shapes(path.name, {value.name: value.shape for value in inputs})
        self._fixed_inputs = make_fixed_inputs({value.name: (parse_dtype(value), value.shape) for value in inputs})

    def sample(self, n: int) -> list[float]:
        return time_calls(lambda: self.infer(self._fixed_inputs), n)

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        with translate_errors(MeasureFailed, "ONNX Runtime", (Exception,)):
            return run_session(self._session, feeds)


class PlainBenchmarker:
    """Benchmarker of ONNX Runtime without graph optimizations, for models in the dialect without fusions."""

    capabilities = Capabilities(dialect="onnxruntime_unfused")

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        path = candidate.source()
        with translate_errors(BuildFailed, path.name, (Exception,)):
            return Artifact(engine=PlainProbe(path))

    def open(self, artifact: Artifact) -> AbstractContextManager[PlainProbe]:
        return nullcontext(artifact.engine)

    def describe(self) -> dict[str, Any]:
        return {"name": "plain", "version": "1", "device": "CPU", "options": {}, "float_precision": "f32"}
