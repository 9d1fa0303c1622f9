"""Latency on ONNX Runtime Web, by the clock of Node.js or the browser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from harness.base.errors import BuildFailed, MeasureFailed, UserError
from harness.graph.io.model_reader import read_model
from harness.measure.provenance import cpu_model_name
from harness.measure.sampling import make_fixed_inputs
from harness.plugins.api import Array, Artifact, Candidate, Capabilities, Layer
from harness.runtimes.host_clock import read_profile, require_static_shapes, to_float32, translate_errors
from harness.runtimes.onnxruntime_web.session import WebSession

PROGRAM = Path(__file__).with_name("child.mjs").read_text(encoding="utf-8")
SESSION_OPTIONS: Mapping[str, Any] = {
    "executionProviders": ["wasm"],
    "graphOptimizationLevel": "all",
    "logSeverityLevel": 3,
}
_ERRORS = (RuntimeError, OSError)


class ONNXRuntimeWebBenchmarker:
    """Benchmarker of the WebAssembly build of npm's onnxruntime-web, with SIMD and one thread.

    Args:
        module_dir: Folder in which `npm install onnxruntime-web` was run; None: the one that the environment variable
            QDQ_ONNXRUNTIME_WEB names. Node.js looks in its parents and in NODE_PATH too.
        node: Path of Node.js, or its name on PATH.
        chromium: Path of a browser that runs the model, or its name on PATH; None: Node.js runs it.
        profile: Record the time of every node, for `layers`. This takes time, so do not compare such engines.
        base: Folder that a relative `module_dir` starts from; None: the working folder.
    """

    capabilities = Capabilities(dialect="onnxruntime_web")
    code_params = ("module_dir",)
    program_params = ("node", "chromium")

    def __init__(
        self,
        module_dir: str | None = None,
        node: str = "node",
        chromium: str | None = None,
        profile: bool = False,
        base: Path | None = None,
    ) -> None:
        self._folder = None if module_dir is None else str((base or Path()) / Path(module_dir).expanduser())
        self._node, self._chromium, self._profile = node, chromium, profile

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Create a session from the candidate's file in a new child process.

        Raises:
            BuildFailed: ONNX Runtime refuses the model, or a shape is not static.
            UserError: Node.js, the package or the browser is missing.
        """
        path = candidate.source()
        with translate_errors(BuildFailed, "ONNX Runtime Web", (UserError,)):
            content = read_model(path, path.name)[0].SerializeToString()
        session = self._start(workdir)
        with translate_errors(BuildFailed, f"ONNX Runtime Web refuses {path.name}", _ERRORS):
            session.load(content, {**SESSION_OPTIONS, "enableProfiling": self._profile})
        require_static_shapes(path.name, {name: shape for name, (_, shape) in session.inputs.items()})
        return Artifact(engine=session)

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[_WebProbe]:
        """Open a probe, send its inputs to the child process, and warm it up.

        Raises:
            MeasureFailed: An input has a type without random values, or the child process ended.
        """
        yield _WebProbe(artifact.engine)

    def layers(self, artifact: Artifact) -> tuple[Layer, ...]:
        """Return the layers of an engine with mean times of its inferences so far, and end its profiling.

        Raises:
            MeasureFailed: The engine was built without `profile`, or not sampled.
        """
        if not self._profile:
            raise MeasureFailed("ONNX Runtime Web reports its layers only with profile: true")
        with translate_errors(MeasureFailed, "ONNX Runtime Web", _ERRORS):
            return read_profile(artifact.engine.request("profile")["trace"])

    def describe(self) -> Mapping[str, Any]:
        return {
            "name": "onnxruntime_web",
            "version": self._facts["version"],
            "device": f"{cpu_model_name()}, {self._facts['engine']}",
            "options": {
                "threads": 1,
                "simd": True,
                "engine": self._facts["engine"],
                **({"profile": True} if self._profile else {}),
            },
            "float_precision": "f32",
        }

    @cached_property
    def _facts(self) -> Mapping[str, str]:
        session = self._start()
        session.close()
        return session.facts

    def _start(self, workdir: Path | None = None) -> WebSession:
        """Start a child process; raise `UserError` if Node.js, the package or the browser is missing."""
        try:
            return WebSession(PROGRAM, node=self._node, folder=self._folder, chromium=self._chromium, scratch=workdir)
        except OSError as error:
            raise UserError(
                f"benchmarker 'onnxruntime_web': Node.js cannot be started ({error}): install it (https://nodejs.org), "
                "or give its place by params: {node: PATH}"
            ) from error
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"benchmarker 'onnxruntime_web': {reason}; `npm install onnxruntime-web` in any folder, and name that "
                "by the environment variable QDQ_ONNXRUNTIME_WEB, or by params: {module_dir: PATH}"
            ) from error


class _WebProbe:
    """Probe of a session that has loaded a model; its inputs for timing are in the child process."""

    def __init__(self, session: WebSession) -> None:
        self._session = session
        types = session.inputs.items()
        arrays = make_fixed_inputs({name: (_numpy_type(name, kind), tuple(shape)) for name, (kind, shape) in types})
        with translate_errors(MeasureFailed, "ONNX Runtime Web", _ERRORS):
            session.warm_up(arrays)

    def sample(self, n: int) -> Sequence[float]:
        """Time n inferences by the clock of the child process, including copies of inputs and outputs."""
        with translate_errors(MeasureFailed, "ONNX Runtime Web", _ERRORS):
            return self._session.sample(n)

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs by name; floating-point ones as float32."""
        if feeds.keys() != self._session.inputs.keys():
            raise MeasureFailed(f"the inputs are {', '.join(self._session.inputs)}, but got {', '.join(feeds)}")
        with translate_errors(MeasureFailed, "ONNX Runtime Web", _ERRORS):
            return {name: to_float32(array) for name, array in self._session(feeds).items()}


def _numpy_type(name: str, kind: str) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(kind)
    except TypeError:
        dtype = np.dtype(str)
    if dtype.kind not in "fiub":
        raise MeasureFailed(f"input {name!r}: no fixed input can be made for type {kind}")
    return dtype
