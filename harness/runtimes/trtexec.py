"""Latency by the command-line tool trtexec: the GPU compute time of its export file, not its printed latency."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from harness.base.errors import BuildFailed, CandidateError, MeasureFailed, UserError
from harness.base.files import parse_json, read_bounded
from harness.plugins.api import Array, Artifact, Candidate, Capabilities, Layer
from harness.runtimes.cuda import Device, open_device
from harness.runtimes.host_clock import to_float32
from harness.runtimes.tensorrt.library import read_layers
from harness.runtimes.tensorrt.options import (
    STRONG_TYPING_ONLY_MAJOR,
    ParsedSource,
    ShapeProfile,
    TensorRTParameters,
    format_shape,
    has_qdq,
    read_io_dtypes,
)

RESERVED_FLAGS = (
    "--onnx", "--saveEngine", "--loadEngine", "--exportTimes", "--exportOutput", "--exportLayerInfo", "--exportProfile",
    "--iterations", "--duration", "--warmUp", "--loadInputs",
)  # fmt: skip
"""Flags that the benchmarker sets itself; they cannot be passed through."""
SKIP_INFERENCE_FLAG = "--skipInference"
"""Set in every build; a run would give no reading with it."""
REPEATABLE_FLAGS = frozenset({"--staticPlugins", "--dynamicPlugins", "--plugins"})
"""Flags that may stand in a command more than once."""
REPLACED_FLAGS = {"--workspace": "--memPoolSize=workspace:4096M, or parameter workspace_gb"}
"""Flags that neither 10 nor 11 has, and what has taken their place."""
WEAK_TYPING_FLAGS = (
    "--fp16", "--bf16", "--int8", "--fp8", "--int4", "--best", "--calib", "--calibProfile", "--layerPrecisions",
    "--layerOutputTypes", "--precisionConstraints", "--restricted", "--weightless",
)  # fmt: skip
"""Flags of 10 that make 11 fail as unknown."""
SAFETY_FLAG = "--remoteAutoTuningConfig"


def parse_version(text: str) -> str:
    """Return the version from trtexec's output, "10.16.1" for "[TensorRT v101601]".

    Raises:
        BuildFailed: There is none.
    """
    found = re.search(r"TensorRT v(\d{4,6})\b", text)
    if found is None:
        raise BuildFailed(f"trtexec does not report its version: {' '.join(text.split())[:200]!r}")
    number = int(found[1])
    if number < 10_000:  # 8 and older: v8601
        return f"{number // 1000}.{number // 100 % 10}.{number % 100}"
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


def check_extra_flags(extra: Sequence[str], major: int) -> None:
    """Check the extra arguments of trtexec; `major` is its major version, or 0 if it is unknown.

    Raises:
        ValueError: The benchmarker sets an argument itself, this version does not know it, or it needs --safe.
    """
    for argument in extra:
        name = argument.partition("=")[0]
        if not name.startswith("--"):
            raise ValueError(f"extra: arguments such as --maxAuxStreams=0, but got {argument!r}")
        if name in RESERVED_FLAGS:
            raise ValueError(f"extra: {name} is set by the benchmarker")
        if name in REPLACED_FLAGS:
            raise ValueError(f"extra: {name} is unknown to trtexec 10 and later; use {REPLACED_FLAGS[name]}")
        if name in WEAK_TYPING_FLAGS and major >= STRONG_TYPING_ONLY_MAJOR:
            raise ValueError(
                f"extra: {name} is unknown to trtexec {major}, where the ONNX file says what runs in which type"
            )
    if any(argument.startswith(SAFETY_FLAG) for argument in extra) and "--safe" not in extra:
        raise ValueError(f"extra: {SAFETY_FLAG} also needs --safe")


def merge_flags(arguments: Sequence[str], extra: Sequence[str]) -> list[str]:
    """Return the arguments of a command and the extra ones, each once, because trtexec refuses duplicates.

    Raises:
        UserError: An extra argument has another value than the benchmarker sets.
    """
    given = {argument.partition("=")[0]: argument for argument in arguments}
    found = list(arguments)
    for argument in extra:
        name = argument.partition("=")[0]
        if argument in found or (name == SKIP_INFERENCE_FLAG and SKIP_INFERENCE_FLAG not in given):
            continue
        if name in given and name not in REPEATABLE_FLAGS:
            raise UserError(
                f"extra: {argument}: the benchmarker sets {given[name]}; use its own parameter for that, such as "
                "workspace_gb, optimization_level, timing_cache_file, profiles, device or plugins"
            )
        found.append(argument)
    return found


def build_flags(source: ParsedSource, engine: Path, options: TensorRTParameters, major: int) -> list[str]:
    """Return the arguments that build an engine without running it.

    Args:
        source: Model and its profiles.
        engine: File that trtexec writes.
        options: Options of the build.
        major: Major version of trtexec.
    """
    flags = [f"--onnx={source.path}", f"--saveEngine={engine}", "--skipInference"]
    precision = options.float_precision
    if options.typing == "strong":
        flags += ["--stronglyTyped"] if major < STRONG_TYPING_ONLY_MAJOR else []
    else:
        flags += {"f16": ["--fp16"], "bf16": ["--bf16"]}.get(precision, [])
        flags += ["--int8"] if has_qdq(source.structure) else []
    if precision != "tf32":
        flags.append("--noTF32")
    if options.workspace_bytes is not None:
        flags.append(f"--memPoolSize=workspace:{options.workspace_bytes // 2**20}M")
    if options.optimization_level is not None:
        flags.append(f"--builderOptimizationLevel={options.optimization_level}")
    if options.profile:
        flags.append("--profilingVerbosity=detailed")
    for key in ("min", "opt", "max") if source.profiles else ():
        flags.append(f"--{key}Shapes={_shape_flag(source.profiles, key)}")
    return flags


def read_times(path: Path, warm_up_ms: float) -> list[float]:
    """Return the GPU compute time of each inference in ms, from the file of --exportTimes.

    The times come from events on the GPU, without transfers and time of the host. The warm-up, which some versions
    export too, is left out.

    Raises:
        MeasureFailed: The file is missing, damaged, or contains only the warm-up.
    """
    times = _read_export(path, "times", lambda row: (float(row["startComputeMs"]), float(row["computeMs"])))
    kept = [compute_ms for start_ms, compute_ms in times if start_ms >= warm_up_ms]
    if not kept:
        raise MeasureFailed(f"trtexec wrote {len(times)} times, none of them after its warm-up of {warm_up_ms:g} ms")
    return kept


def read_profile(path: Path) -> dict[str, float]:
    """Return the mean time in ms of each layer by name, from the file of --exportProfile.

    Raises:
        MeasureFailed: The file is missing or damaged.
    """
    rows = _read_export(
        path, "profile", lambda row: (str(row["name"]), float(row["averageMs"])) if "name" in row else None
    )
    return dict(row for row in rows if row is not None)


def read_outputs(path: Path) -> dict[str, tuple[tuple[int, ...], list[float]]]:
    """Return shape and values, flattened, of each output by name, from the file of --exportOutput.

    Raises:
        MeasureFailed: The file is missing or damaged.
    """

    def read(row: Any) -> tuple[str, tuple[tuple[int, ...], list[float]]]:
        sizes = tuple(int(size) for size in str(row["dimensions"]).split("x") if size)
        return str(row["name"]), (sizes, [float(value) for value in row["values"]])

    return dict(_read_export(path, "outputs", read))


def _read_export(path: Path, what: str, read: Callable[[Any], T]) -> list[T]:
    """Return the rows of a file of trtexec; raise `MeasureFailed` if it is missing or damaged."""
    try:
        return [read(row) for row in parse_json(read_bounded(path, "output of trtexec"))]
    except (UserError, KeyError, TypeError, ValueError) as error:
        reason = error if isinstance(error, UserError) else repr(error)
        raise MeasureFailed(f"trtexec's {what} cannot be read: {reason}") from error


def _shape_flag(profiles: Mapping[str, ShapeProfile], key: str) -> str:
    return ",".join(f"'{name}':{format_shape(getattr(profile, key))}" for name, profile in profiles.items())


HELP_TIMEOUT_S = 60.0
MAX_LOG_LINES = 8
"""Lines of its output that messages quote."""


def find_trtexec(path: str | None) -> tuple[str, str]:
    """Return the path of the program and its version.

    Args:
        path: Path of the program; None: trtexec on PATH.

    Raises:
        UserError: The program does not exist, or is not trtexec.
    """
    program = shutil.which(path or "trtexec")
    if program is None:
        raise UserError(
            f"benchmarker 'trtexec': no program {path or 'trtexec on PATH'}; it comes with TensorRT's archive, Debian "
            "packages and containers, not with pip: give its place by params: {path: ...}, or use 'tensorrt' instead"
        )
    try:
        return program, parse_version(run_trtexec([program, "--help"], HELP_TIMEOUT_S, BuildFailed))
    except BuildFailed as error:
        raise UserError(f"benchmarker 'trtexec': {program}: {error}") from error


def run_trtexec(command: Sequence[str], timeout_s: float, failure: type[CandidateError]) -> str:
    """Run trtexec, and return what it prints on stdout and stderr.

    Raises:
        CandidateError: trtexec fails or takes longer than `timeout_s`; the class of the exception is `failure`.
    """
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise failure(f"trtexec took longer than {timeout_s:g} s (timeout_s)") from error
    except OSError as error:
        raise failure(f"trtexec cannot be started: {error}") from error
    if done.returncode:
        raise failure(f"trtexec failed with status {done.returncode}: {error_lines(done.stdout)}")
    return done.stdout


def error_lines(output: str) -> str:
    """Return the last lines of trtexec's output that report errors, or else its last lines, joined by spaces."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "[E]" in line or "Unknown option" in line]
    return " ".join((errors or lines)[-MAX_LOG_LINES:]) or "it printed nothing"


T = TypeVar("T")
MIN_ITERATIONS = 50
"""Inferences of one run of trtexec: starting it takes longer than they do."""
MAX_LEFTOVER_AGE_S = 1.0
"""Readings that are left over serve the next call within this time; later ones are taken anew."""


@dataclass(frozen=True, slots=True)
class _TrtexecEngine:
    """Serialized engine with the information to run it.

    Attributes:
        profiles: Shapes of dynamic inputs by name.
    """

    plan: Path
    profiles: Mapping[str, ShapeProfile]
    outputs: Mapping[str, np.dtype[Any]]
    inputs: Mapping[str, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrtexecHandle:
    """Path, version and major version of trtexec, and its GPU."""

    program: str
    version: str
    major: int
    device: Device


@dataclass(eq=False, kw_only=True)
class TrtexecBenchmarker(TensorRTParameters):
    """Build and time models with the program trtexec of TensorRT 10 or 11, each in a new process.

    Args:
        path: Path of the program; None: trtexec on PATH.
        warm_up_ms: Milliseconds of warm-up of each run of trtexec.
        timeout_s: Time limit of each run of trtexec in seconds.
        extra: Further arguments for builds and runs, for instance those of remote autotuning:
            `[--safe, --skipInference, "--remoteAutoTuningConfig=ssh://..."]`; --skipInference is left out of runs.
            Other parameters are those of `harness.runtimes.tensorrt.options.TensorRTParameters`.

    Raises:
        ValueError: An extra argument or a profile is invalid.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        dialect="tensorrt", interleaved=False, tensors_only=True, tunes_builds=True
    )
    code_params: ClassVar[tuple[str, ...]] = ("plugins", "extra", "timing_cache_file")
    program_params: ClassVar[tuple[str, ...]] = ("path",)
    path: str | None = None
    warm_up_ms: float = 200.0
    timeout_s: float = 600.0
    extra: tuple[str, ...] | list[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_extra_flags(self.extra, 0)

    @cached_property
    def _trtexec_handle(self) -> _TrtexecHandle:
        """Return trtexec and the GPU, which are looked up at the first use."""
        device = open_device(self.device)[1]
        program, version = find_trtexec(self.path)
        major = int(version.partition(".")[0])
        try:
            check_extra_flags(self.extra, major)
        except ValueError as error:
            raise UserError(f"benchmarker 'trtexec': {error}") from error
        self.check_runtime(f"trtexec {version}", major, device)
        return _TrtexecHandle(program=program, version=version, major=major, device=device)

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Build the candidate's engine into the folder.

        Raises:
            BuildFailed: trtexec fails, takes too long, or the model is known to be refused.
            UserError: There is no trtexec or no GPU.
        """
        tool, plan = self._trtexec_handle, workdir / "model.plan"
        source = self.source(candidate.source(), workdir, tool.device)
        flags, cached = build_flags(source, plan, self, tool.major), list[str]()
        if self.timing_cache != "cold":
            file = self.timing_cache_path(f"trtexec-{tool.version}", tool.device)
            if self.timing_cache == "frozen":
                if not file.is_file():
                    raise UserError(
                        f"timing cache {file}: no such file, and a frozen cache is never made; run shared once"
                    )
                file = Path(shutil.copy(file, workdir / "timing.cache"))  # because trtexec writes to it
            file.parent.mkdir(parents=True, exist_ok=True)
            cached.append(f"--timingCacheFile={file}")
        output = self._run_trtexec([*flags, *cached], BuildFailed)
        if not plan.is_file():
            raise BuildFailed(f"trtexec wrote no engine: {error_lines(output)}")
        inputs, outputs = read_io_dtypes(source.structure)
        engine = _TrtexecEngine(plan=plan, profiles=source.profiles, inputs=inputs, outputs=outputs)
        return Artifact(engine=engine, info={"plan_bytes": plan.stat().st_size, "flags": flags[3:]})

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[_TrtexecProbe]:
        """Open a probe that starts trtexec for every series of readings."""
        yield _TrtexecProbe(self, artifact.engine)

    def layers(self, artifact: Artifact) -> tuple[Layer, ...]:
        """Return the layers of the engine with their times from a run under trtexec's profiler.

        Raises:
            MeasureFailed: trtexec fails, or its files cannot be read.
        """
        folder = artifact.engine.plan.parent
        info, times = folder / "layers.json", folder / "profile.json"
        files = [f"--exportLayerInfo={info}", f"--exportProfile={times}"]
        if self._trtexec_handle.major < STRONG_TYPING_ONLY_MAJOR:
            files.append("--separateProfileRun")  # always so in 11
        self.trtexec(artifact.engine, [*files, f"--iterations={MIN_ITERATIONS}", "--duration=0"])
        try:
            rows = read_profile(times)
            return read_layers(info.read_text(encoding="utf-8"), rows)
        except OSError as error:
            raise MeasureFailed(f"trtexec wrote no layers: {error}") from error

    def describe(self) -> Mapping[str, Any]:
        """Return the facts that results record; see `harness.plugins.api.Benchmarker`.

        Raises:
            UserError: trtexec or a GPU is missing on this machine; the message has the remedy.
        """
        tool = self._trtexec_handle
        return {
            "name": "trtexec",
            "version": tool.version,
            "device": tool.device.name,
            "options": {
                **self.describe_options(tool.device),
                "cuda_graph": self.cuda_graph,
                "warm_up_ms": self.warm_up_ms,
                "extra": list(self.extra),
                **({"plugins": [path.name for path in self.plugin_paths]} if self.plugin_paths else {}),
            },
            **self.describe_float_precision(tool.device),
        }

    def gpu(self) -> str:
        return self._trtexec_handle.device.uuid

    def trtexec(self, engine: _TrtexecEngine, arguments: Sequence[str]) -> str:
        """Run an engine with further arguments of trtexec, and return what trtexec prints.

        Raises:
            MeasureFailed: trtexec fails or takes too long.
        """
        # Spin wait, no data transfers, and a CUDA graph if it is wanted; dynamic inputs have the shape `opt`.
        flags = [f"--loadEngine={engine.plan}"]
        if self._trtexec_handle.major < STRONG_TYPING_ONLY_MAJOR:
            flags += ["--noDataTransfers", "--useSpinWait", *(["--useCudaGraph"] if self.cuda_graph else [])]
        elif not self.cuda_graph:
            flags.append("--noCudaGraph")
        if engine.profiles:
            flags.append(f"--shapes={_shape_flag(engine.profiles, 'opt')}")
        return self._run_trtexec([*flags, *arguments], MeasureFailed)

    def _run_trtexec(self, arguments: Sequence[str], failure: type[CandidateError]) -> str:
        plugins = [f"--staticPlugins={path}" for path in self.plugin_paths]
        command = merge_flags([*arguments, f"--device={self.device}", *plugins], self.extra)
        return run_trtexec([self._trtexec_handle.program, *command], self.timeout_s, failure)


class _TrtexecProbe:
    """Probe of one engine, whose readings come from runs of trtexec."""

    def __init__(self, owner: TrtexecBenchmarker, engine: _TrtexecEngine) -> None:
        self._owner, self._engine = owner, engine
        self._left: deque[float] = deque()
        self._taken_s = 0.0

    def sample(self, n: int) -> Sequence[float]:
        """Return GPU compute times of n inferences in milliseconds."""
        if time.monotonic() - self._taken_s > MAX_LEFTOVER_AGE_S:
            self._left.clear()
        if len(self._left) < n:
            times = self._engine.plan.parent / "times.json"
            times.unlink(missing_ok=True)
            wanted, warm_up_ms = max(MIN_ITERATIONS, n - len(self._left)), self._owner.warm_up_ms
            flags = [f"--iterations={wanted}", "--duration=0", f"--warmUp={warm_up_ms:g}", f"--exportTimes={times}"]
            self._owner.trtexec(self._engine, flags)
            self._left.extend(read_times(times, warm_up_ms))
            self._taken_s = time.monotonic()
        if len(self._left) < n:
            raise MeasureFailed(f"trtexec gave {len(self._left)} readings where {n} were asked for")
        return [self._left.popleft() for _ in range(n)]

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs by name, with the six digits that trtexec writes; each call starts a process."""
        engine, folder = self._engine, self._engine.plan.parent
        if feeds.keys() != engine.inputs.keys():
            raise MeasureFailed(f"the engine's inputs are {', '.join(engine.inputs)}, but got {', '.join(feeds)}")
        files = []
        for index, (name, dtype) in enumerate(engine.inputs.items()):
            file = folder / f"input{index}.bin"
            file.write_bytes(np.ascontiguousarray(feeds[name], dtype).tobytes())
            files.append(f"'{name}':{file}")
        target = folder / "outputs.json"
        target.unlink(missing_ok=True)
        once = ["--iterations=1", "--duration=0", "--warmUp=0"]
        self._owner.trtexec(engine, [f"--loadInputs={','.join(files)}", f"--exportOutput={target}", *once])
        found = read_outputs(target)
        missing = [name for name in engine.outputs if name not in found]
        if missing:
            raise MeasureFailed(f"trtexec wrote no output {missing[0]!r}, but {', '.join(found)}")
        return {
            name: to_float32(np.asarray(found[name][1]).reshape(found[name][0]).astype(dtype))
            for name, dtype in engine.outputs.items()
        }
