"""Builds of TensorRT-RTX ahead of time: verdict of its parser and its builder, and the kernels of the engine.

The user installs the library, an optional dependency with its own licence. No engine is stored or timed. A build runs
in the helper process, so that a crash affects one model only.

Kernels are read from the library's log at detailed verbosity, because the engine inspector needs a GPU. The format is
not documented, so a line that does not have the form of versions 1.7 is an error.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from harness.base.errors import BuildFailed, UserError, install_hint
from harness.graph.io.model_reader import refuse_damage
from harness.graph.qdq.file_checks import find_refused_qdq
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.rules.dialects import TENSORRT_RTX
from harness.plugins.api import Artifact, Candidate, Capabilities, require_timing
from harness.workers.helper_process import HelperCallFailed, call_in_helper_process

TARGETS: Mapping[str, tuple[int, int]] = {
    "sm75": (7, 5), "sm80": (8, 0), "sm86": (8, 6), "sm89": (8, 9), "sm120": (12, 0), "sm121": (12, 1)
}  # fmt: skip
"""Compute capability by the name of a target; the compiler refuses all others."""
DEFAULT_TARGET = "sm89"
"""The oldest one that has FP8."""
WHEEL_VERSIONS = ((3, 11), (3, 13), (3, 14))
"""Versions of Python, from ours on, that the library has wheels for."""
BUILD_FACTOR = 20.0
"""Of the helper process's time limit: 20 minutes. The largest transformers take one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Refusal of a model.

    Attributes:
        stage: "parser" or "builder".
        node: Node of the file that is refused; "" if it is unknown.
        message: First error of the compiler, on one line.
        rule: Placement rule of this project that the node breaks, with its reason; "" if there is none.
        crashed: Whether the compiler crashed or exceeded a limit, so that this is no verdict.
    """

    stage: str
    node: str
    message: str
    rule: str = ""
    crashed: bool = False

    def __str__(self) -> str:
        known = f" (our rule {self.rule})" if self.rule else ""
        return f"the {self.stage} refuses {self.node or 'it, and names no node'}: {self.message}{known}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """Verdict of the compiler on one model.

    Attributes:
        target: Key of `TARGETS`, for instance "sm89".
        build_s: Time of the build on this machine, in seconds; no measure of latency.
        kernels: Kernels in order of execution; empty if the model was refused.
        refusal: Reason of the refusal; None if the model was built.
        warnings: Warnings of the compiler without duplicates.
    """

    target: str
    version: str
    build_s: float
    kernels: tuple[Kernel, ...] = ()
    refusal: Refusal | None = None
    warnings: tuple[str, ...] = ()


def import_compiler() -> Any:
    """Return the module `tensorrt_rtx`, which has the compiler.

    Raises:
        UserError: It is not installed, or does not load; the message has one line with the remedy.
    """
    try:
        import tensorrt_rtx
    except (ImportError, OSError) as error:
        have, offered = ".".join(map(str, sys.version_info[:2])), [".".join(map(str, v)) for v in WHEEL_VERSIONS]
        remedy = install_hint("rtx")
        if sys.version_info[:2] not in WHEEL_VERSIONS:
            remedy = f"it has no wheels for Python {have}: use {', '.join(offered)}, then {remedy}"
        raise UserError(f"NVIDIA's compiler cannot be used ({error}): {remedy}; it needs no GPU") from error
    return tensorrt_rtx


def require_target(target: str) -> None:
    """Raise `UserError` for a target that is no key of `TARGETS`."""
    if target not in TARGETS:
        raise UserError(f"target {target!r}: the compiler builds for {', '.join(TARGETS)} alone")


def compile_file(path: Path, target: str) -> Compilation:
    """Compile a model file, and return the verdict; a refusal names the node and the broken rule if they are known.

    Args:
        path: File of the model.
        target: Key of `TARGETS`, for instance "sm89".

    Raises:
        UserError: The library is missing, or the target is unknown.
        BuildFailed: The library's list of kernels has an unknown form.
    """
    require_target(target)
    version = str(import_compiler().__version__)
    started_s = time.monotonic()
    try:
        what = f"{path.name}: the build for {target}"
        found = call_in_helper_process(what, _build_file, path, target, factor=BUILD_FACTOR)
    except HelperCallFailed as error:
        refusal = Refusal(stage="builder", node="", message=error.how, crashed=True)
        found = Compilation(target=target, version=version, build_s=time.monotonic() - started_s, refusal=refusal)
    if found.refusal is None:
        return found
    with refuse_damage(path):
        problems = list(find_refused_qdq(read_qdq_graph(path), TARGETS[target], TENSORRT_RTX))
    named = [problem for problem in problems if problem.node == found.refusal.node]
    for problem in (*named, *problems)[:1]:
        refusal = replace(found.refusal, node=found.refusal.node or problem.node, rule=f"{problem.rule!r}: {problem}")
        return replace(found, refusal=refusal)
    return found


def _build_file(path: Path, target: str) -> Compilation:
    """Compile a file in this process."""
    trt = import_compiler()
    errors: list[str] = []
    warnings: list[str] = []
    layers: list[str] = []

    class Log(trt.ILogger):  # type: ignore[misc, name-defined]
        """Logger that stores warnings, errors and the list of kernels."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                errors.append(_one_line(text))
            elif severity == trt.ILogger.WARNING:
                warnings.append(_one_line(text))
            elif text.startswith(LIST_HEAD):
                layers.append(text)

    log, started_s = Log(), time.monotonic()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    refusal, kernels = None, tuple[Kernel, ...]()
    if not parser.parse_from_file(str(path)):
        first = parser.get_error(0)
        refusal = Refusal(stage="parser", node=first.node_name(), message=_one_line(first.desc()))
    else:
        config = builder.create_builder_config()
        config.num_compute_capabilities = 1
        if not config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), 0):
            raise UserError(f"target {target}: refused by the installed compiler, {trt.__version__}")
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if builder.build_serialized_network(network, config) is None:
            refusal = Refusal(stage="builder", node="", message=errors[0] if errors else "no reason")
        else:
            kernels = read_kernels(layers[-1] if layers else "")
    return Compilation(
        target=target,
        version=str(trt.__version__),
        build_s=time.monotonic() - started_s,
        kernels=kernels,
        refusal=refusal,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _one_line(text: str) -> str:
    return " ".join(str(text).split())


LIST_HEAD = "Layers:"
"""Beginning of the log message that holds the list."""
SYNCHRONIZATION_KINDS = frozenset({"signal", "wait"})
"""Entries that let one stream wait for another; they are no kernels."""
_TYPE_NAMES: Mapping[str, str] = {"Float": "f32", "Half": "f16", "BFloat16": "bf16", "BF16": "bf16"}
_KERNEL = re.compile(
    r"Name: (?P<name>.+?), LayerType: (?P<kind>\w+), Inputs: \[(?P<inputs>.*?)\], Constants: \[(?P<constants>.*?)\], "
    r"Outputs: \[(?P<outputs>.*?)\], TacticName: (?P<tactic>.*?), "
    r"StreamId: \d+, (?:EventId: \d+, )?Metadata: ?(?P<metadata>.*)"
)
_TENSOR = re.compile(
    r"\s*\{ Name: (?P<name>(?:(?!, Dimensions: \[).)+), Dimensions: \[(?P<shape>[\d,-]*)\], "
    r"(?:Strides: \[[\d,-]*\], StrideOrder: \[[\d,]*\], )?Datatype: (?P<type>\w+), Format: [^{}]*?\},?\s*"
)
_ORIGIN = re.compile(r"\[ONNX Layer: (.+)\](?:__\w+)?")
_ORIGIN_SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTensor:
    """Input, constant or output of a kernel; `type` is for instance "f32", "f16", "bf16", "int8" or "fp8"."""

    name: str
    shape: tuple[int, ...]
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Kernel of a compiled model.

    Attributes:
        kind: Kind in the compiler's terms: "correlation" (a convolution), "gemm", "kgen" (generated code).
        constants: Weights, scales and biases.
        tactic: Implementation that the compiler chose.
        origin: Nodes of the file that the kernel computes; empty for a kernel that the compiler added.
    """

    name: str
    kind: str
    inputs: tuple[KernelTensor, ...]
    constants: tuple[KernelTensor, ...]
    outputs: tuple[KernelTensor, ...]
    tactic: str
    origin: tuple[str, ...]


def read_kernels(message: str) -> tuple[Kernel, ...]:
    """Return the kernels that a log message lists, without synchronizations of streams.

    Args:
        message: Message that starts with `LIST_HEAD`.

    Raises:
        BuildFailed: The message does not have the form of versions 1.7.
    """
    head, _, rest = message.partition("\n")
    if head.strip() != LIST_HEAD:
        raise BuildFailed(f"the compiler's list of kernels begins with {head[:40]!r} instead of {LIST_HEAD!r}")
    kernels = []
    for line in filter(str.strip, rest.partition("\n\n")[0].split("\n")):
        found = _KERNEL.fullmatch(line.strip())
        if found is None:
            raise BuildFailed(f"the compiler's list of kernels has a line of an unknown form: {line[:80]!r}")
        origin = []
        for part in filter(None, found["metadata"].split(_ORIGIN_SEPARATOR)):
            named = _ORIGIN.fullmatch(part)
            if named is None:
                text = found["metadata"][:80]
                raise BuildFailed(f"the compiler's list of kernels has metadata of an unknown form: {text!r}")
            origin.append(named[1])
        inputs, constants, outputs = (
            tuple(_read_tensors(found[group])) for group in ("inputs", "constants", "outputs")
        )
        if found["kind"] not in SYNCHRONIZATION_KINDS:
            kernels.append(
                Kernel(
                    name=found["name"],
                    kind=found["kind"],
                    inputs=inputs,
                    constants=constants,
                    outputs=outputs,
                    tactic=found["tactic"],
                    origin=tuple(origin),
                )
            )
    return tuple(kernels)


def _read_tensors(text: str) -> Iterator[KernelTensor]:
    place = 0
    while text[place:].strip():
        found = _TENSOR.match(text, place)
        if found is None:
            raise BuildFailed(f"the compiler's list of kernels has a tensor of an unknown form: {text[place:][:80]!r}")
        shape = tuple(int(size) for size in found["shape"].split(",") if size)
        kind = found["type"]
        yield KernelTensor(name=found["name"], shape=shape, type=_TYPE_NAMES.get(kind, kind.lower()))
        place = found.end()


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

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Compile the candidate's file.

        Raises:
            BuildFailed: The compiler refuses it.
            UserError: The compiler is not installed.
        """
        found = compile_file(candidate.source(), self.target)
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
