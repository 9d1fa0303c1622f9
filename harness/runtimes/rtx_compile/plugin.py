"""Backend `rtx_compile`: kernels and verdict of NVIDIA's compiler of TensorRT-RTX, without latency."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from harness.base.errors import BuildFailed
from harness.plugins.api import Artifact, Candidate, Capabilities, require_timing
from harness.runtimes.rtx_compile.compiler import (
    DEFAULT_TARGET,
    Compilation,
    compile_file,
    import_compiler,
    require_target,
)


class RTXCompiler:
    """Benchmarker that only compiles models with TensorRT for RTX, without timing; the GPU need not be present.

    Args:
        target: Compute capability of the GPU: sm75, sm80, sm86, sm89, sm120 or sm121.

    Raises:
        UserError: The target is unknown.
    """

    capabilities = Capabilities(dialect="tensorrt_rtx", compile_only=True)

    def __init__(self, *, target: str = DEFAULT_TARGET) -> None:
        require_target(target)
        self.target = target

    def compile(self, path: Path) -> Compilation:
        """Return the verdict on a model file; see `compile_file`, also for errors."""
        return compile_file(path, self.target)

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Compile the candidate's file.

        Raises:
            BuildFailed: The compiler refuses it.
            UserError: The compiler is not installed.
        """
        found = self.compile(candidate.source())
        if found.refusal is not None:
            raise BuildFailed(str(found.refusal))
        return Artifact(engine=found)

    def open(self, artifact: Artifact) -> NoReturn:
        """Raise an error, because compiled models cannot run.

        Raises:
            UserError: Always.
        """
        require_timing("rtx_compile", self)
        raise AssertionError

    def describe(self) -> Mapping[str, Any]:
        """Return the facts of the compiler.

        Raises:
            UserError: It is not installed.
        """
        return {
            "name": "rtx_compile",
            "version": str(import_compiler().__version__),
            "device": f"none; compiles for {self.target}",
            "options": {"target": self.target},
            "float_precision": "f32",
        }
