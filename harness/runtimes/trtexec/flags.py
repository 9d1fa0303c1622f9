"""Command lines of trtexec for each major version, and readers of the files that it writes.

The flags differ between versions: 11 fails on precision flags, and has other defaults for data transfers, spin wait and
CUDA graphs. So these are always given explicitly, in the spelling of the version (TensorRT,
samples/common/sampleOptions.cpp of 10.16 and 11.1).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.base.errors import BuildFailed, CandidateError, MeasureFailed, UserError
from harness.base.untrusted import parse_json, read_bounded
from harness.runtimes.tensorrt.library import STRONG_TYPING_ONLY_MAJOR
from harness.runtimes.tensorrt.options import BuildOptions, ShapeProfile, format_shape

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


def build_flags(model: Path, engine: Path, options: BuildOptions, major: int, *, quantized: bool) -> list[str]:
    """Return the arguments that build an engine without running it.

    Args:
        model: File of the model.
        engine: File that trtexec writes.
        options: Options of the build.
        major: Major version of trtexec.
        quantized: Whether the model has Q/DQ pairs.
    """
    flags = [f"--onnx={model}", f"--saveEngine={engine}", "--skipInference"]
    if options.typing == "strong":
        flags += ["--stronglyTyped"] if major < STRONG_TYPING_ONLY_MAJOR else []
    else:
        flags += {"f16": ["--fp16"], "bf16": ["--bf16"]}.get(options.precision, [])
        flags += ["--int8"] if quantized else []
    if options.precision != "tf32":
        flags.append("--noTF32")
    if options.workspace_bytes is not None:
        flags.append(f"--memPoolSize=workspace:{options.workspace_bytes // 2**20}M")
    if options.optimization_level is not None:
        flags.append(f"--builderOptimizationLevel={options.optimization_level}")
    if options.detailed:
        flags.append("--profilingVerbosity=detailed")
    for key in ("min", "opt", "max") if options.profiles else ():
        flags.append(f"--{key}Shapes={_shape_flag(options.profiles, key)}")
    return flags


def run_flags(engine: Path, profiles: Mapping[str, ShapeProfile], major: int, *, graph: bool) -> list[str]:
    """Return the arguments that time an engine with spin wait, without data transfers, and as a CUDA graph if `graph`.

    Dynamic inputs get the shape `opt` of their profile; `major` is the major version of trtexec.
    """
    flags = [f"--loadEngine={engine}"]
    if major < STRONG_TYPING_ONLY_MAJOR:
        flags += ["--noDataTransfers", "--useSpinWait", *(["--useCudaGraph"] if graph else [])]
    elif not graph:
        flags.append("--noCudaGraph")
    if profiles:
        flags.append(f"--shapes={_shape_flag(profiles, 'opt')}")
    return flags


def read_times(path: Path, warm_up_ms: float) -> list[float]:
    """Return the GPU compute time of each inference in ms, from the file of --exportTimes.

    The times come from events on the GPU, without transfers and time of the host. The warm-up, which some versions
    export too, is left out.

    Raises:
        MeasureFailed: The file is missing, damaged, or contains only the warm-up.
    """
    rows = _read_json_export(path, "times")
    try:
        times = [(float(row["startComputeMs"]), float(row["computeMs"])) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise MeasureFailed(f"trtexec's times cannot be read: {error!r}") from error
    kept = [compute_ms for start_ms, compute_ms in times if start_ms >= warm_up_ms]
    if not kept:
        raise MeasureFailed(f"trtexec wrote {len(times)} times, none of them after its warm-up of {warm_up_ms:g} ms")
    return kept


def read_profile(path: Path) -> dict[str, float]:
    """Return the mean time in ms of each layer by name, from the file of --exportProfile.

    Raises:
        MeasureFailed: The file is missing or damaged.
    """
    try:
        return {
            str(row["name"]): float(row["averageMs"]) for row in _read_json_export(path, "profile") if "name" in row
        }
    except (KeyError, TypeError, ValueError) as error:
        raise MeasureFailed(f"trtexec's profile cannot be read: {error!r}") from error


def read_outputs(path: Path) -> dict[str, tuple[tuple[int, ...], list[float]]]:
    """Return shape and values, flattened, of each output by name, from the file of --exportOutput.

    Raises:
        MeasureFailed: The file is missing or damaged.
    """
    try:
        return {
            str(row["name"]): (
                tuple(int(size) for size in str(row["dimensions"]).split("x") if size),
                [float(value) for value in row["values"]],
            )
            for row in _read_json_export(path, "outputs")
        }
    except (KeyError, TypeError, ValueError) as error:
        raise MeasureFailed(f"trtexec's outputs cannot be read: {error!r}") from error


def _shape_flag(profiles: Mapping[str, ShapeProfile], key: str) -> str:
    return ",".join(f"'{name}':{format_shape(getattr(profile, key))}" for name, profile in profiles.items())


def _read_json_export(path: Path, what: str) -> Any:
    try:
        return parse_json(read_bounded(path, "output of trtexec"))
    except (UserError, ValueError) as error:
        raise MeasureFailed(f"trtexec's {what} cannot be read: {error}") from error


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
