"""The command line of ModelOpt's autotune with its names and defaults, and what is ours beside it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.compat.modelopt_autotune.common import DQ_DTYPES, QUANT_TYPES, AutotunerError, parse_dq_dtype
from harness.errors import UserError

__all__ = [
    "MODE_PRESETS",
    "ModePreset",
    "add_sizes",
    "get_node_filter_list",
    "get_parser",
    "ineffective_flags",
    "parse_arguments",
    "parse_shapes",
    "select_mode_preset",
]  # fmt: skip

MODE_PRESETS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "quick": MappingProxyType({"schemes_per_region": 30, "warmup_runs": 10, "timing_runs": 50}),
        "default": MappingProxyType({"schemes_per_region": 50, "warmup_runs": 50, "timing_runs": 100}),
        "extensive": MappingProxyType({"schemes_per_region": 200, "warmup_runs": 50, "timing_runs": 200}),
    }
)
"""Figures of ModelOpt 0.47."""
MAX_FILTER_BYTES = 1 << 20
TRTEXEC = "--trtexec_benchmark_args"
MIN_TIMING_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModePreset:
    """How thorough a run is."""

    schemes_per_region: int
    warmup_runs: int
    timing_runs: int


def select_mode_preset(options: argparse.Namespace) -> ModePreset:
    """The preset of the mode, apart from what was given.

    Raises:
        AutotunerError: A figure that cannot be.
    """
    given = {name: getattr(options, name) for name in ModePreset.__dataclass_fields__}
    least = {"schemes_per_region": 1, "warmup_runs": 0, "timing_runs": 1}
    for name, value in given.items():
        if value is not None and value < least[name]:
            raise AutotunerError(f"--{name} is at least {least[name]}, but got {value}")
    return ModePreset(**{**MODE_PRESETS[options.mode], **{name: v for name, v in given.items() if v is not None}})


def ineffective_flags(options: argparse.Namespace, taken: Collection[str], *, typed: bool) -> Iterator[str]:
    """Yield the flags of a command line that change nothing, with the reason.

    Args:
        options: The options.
        taken: Parameters that the backend was given.
        typed: The type of every tensor that may be quantized is known.
    """
    default = get_parser().get_default("timing_cache")
    if options.timing_cache != default and "timing_cache_file" not in taken:
        yield f"--timing_cache {options.timing_cache}: this backend has no timing cache"
    if options.calibration_samples is not None and options.calibration_data is None:
        yield "--calibration_samples: there is no --calibration_data to take samples of"
    if typed and options.default_dq_dtype != "float32":
        yield f"--default_dq_dtype {options.default_dq_dtype}: all types of this model are known"
    if options.timing_runs is not None and options.timing_runs < MIN_TIMING_RUNS:
        yield f"--timing_runs {options.timing_runs}: {MIN_TIMING_RUNS} are timed, the fewest that have a median"
    if options.mode != "default" and all(
        getattr(options, name) is not None for name in ModePreset.__dataclass_fields__
    ):
        yield f"--mode {options.mode}: each of its figures is given by a flag of its own"


def get_node_filter_list(node_filter_list_path: str | None) -> list[str] | None:
    """Wildcards of a file, one a line; empty lines and those that begin with "#" are left out. None: no file.

    Raises:
        UserError: The file cannot be read, or has none.
    """
    if not node_filter_list_path:
        return None
    path = Path(node_filter_list_path)
    try:
        if path.stat().st_size > MAX_FILTER_BYTES:
            raise UserError(f"--node_filter_list {path}: more than {MAX_FILTER_BYTES} bytes are no list of wildcards")
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--node_filter_list {path}: cannot be read: {_describe_pattern_error(error)}") from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise UserError(f"--node_filter_list {path}: there is no wildcard in it; one a line, such as *conv*")
    return found


def _describe_pattern_error(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is no text"


def parse_arguments(given: Sequence[str], prog: str) -> argparse.Namespace:
    """The options of a command line; ends the process where one is wrong, as argparse does."""
    return get_parser(prog).parse_args(_join_option_value(given, TRTEXEC))


def _join_option_value(given: Sequence[str], option: str) -> list[str]:
    """Return arguments with an option and its value in one: argparse takes a value such as --verbose for an option."""
    found: list[str] = []
    for argument in given:
        if found and found[-1] == option:
            found[-1] = f"{option}={argument}"
        else:
            found.append(argument)
    return found


def get_parser(prog: str = "python -m harness.compat.modelopt_autotune") -> argparse.ArgumentParser:
    """The parser."""
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,  # a misspelled flag is told at once, not after the run
        description="Finds by measured latency where Q/DQ pairs belong in an ONNX model, region after region.",
        epilog=f"Example: {prog} --onnx_path model.onnx --output_dir out/model. "
        "An interrupted run goes on when the same command is given again.",
    )
    parser.add_argument("--verbose", "-v", action="store_true", help="show what the parts log")
    _add_files(parser.add_argument_group("Model and Output"))
    _add_strategy(parser.add_argument_group("Autotuning Strategy"))
    _add_quantization(parser.add_argument_group("Quantization"))
    _add_benchmark(parser.add_argument_group("Benchmark"))
    return parser


def _add_files(group: Any) -> None:
    group.add_argument("--onnx_path", "-m", required=True, help="ONNX file; also zoo:NAME or assets:PATH")
    group.add_argument(
        "--output_dir", "-o", default="./autotuner_output", help="folder of the results (default: %(default)s)"
    )
    add_sizes(group)


def add_sizes(group: Any) -> None:
    """Add the options that fix dynamic inputs."""
    group.add_argument(
        "--shape", action="append", metavar="NAME:1x3x224x224", help="static shape of a dynamic input; repeat per input"
    )
    group.add_argument(
        "--dim",
        action="append",
        metavar="SYMBOL=128",
        help="size of a dynamic dimension, by its symbol; repeat per symbol (default: 1 for the batch)",
    )


def parse_shapes(options: argparse.Namespace) -> dict[str, str]:
    """Static shapes by input name.

    Raises:
        AutotunerError: One is not of the form NAME:SHAPE.
    """
    found = {}
    for text in options.shape or ():
        name, colon, shape = text.rpartition(":")
        if not colon:
            raise AutotunerError(f"--shape {text}: NAME:SHAPE, for instance --shape images:1x3x224x224")
        found[name] = shape
    return found


def _add_strategy(group: Any) -> None:
    group.add_argument(
        "--mode",
        choices=sorted(MODE_PRESETS, key=list(MODE_PRESETS).index),
        default="default",
        help="preset of schemes_per_region, warmup_runs and timing_runs, which count where given (default: default)",
    )
    group.add_argument(
        "--schemes_per_region", "-s", type=int, help="schemes measured for a region (default: 50, or the mode's)"
    )
    group.add_argument("--pattern_cache", help="pattern cache of an earlier run, for a warm start")
    group.add_argument("--qdq_baseline", help="Q/DQ model made from this model, to begin with")
    group.add_argument("--state_file", help="state file (default: OUTPUT_DIR/autotuner_state.yaml)")
    group.add_argument(
        "--node_filter_list", help="file of wildcards, one a line; regions without a node of such a name stay float"
    )
    group.add_argument(
        "--searcher",
        help="this searcher (see qdq list) gets the whole model at once (default: random mutation, region by region)",
    )
    group.add_argument(
        "--max_evals", type=int, help="measured models at most, all regions together (default: no limit)"
    )
    group.add_argument("--seed", type=int, default=0, help="of the searcher (default: %(default)s)")


def _add_quantization(group: Any) -> None:
    group.add_argument("--quant_type", choices=QUANT_TYPES, default="int8", help="(default: %(default)s)")
    group.add_argument(
        "--default_dq_dtype",
        type=parse_dq_dtype,
        choices=DQ_DTYPES,
        default="float32",
        help="type of tensors whose type cannot be inferred (default: %(default)s)",
    )
    group.add_argument(
        "--calibration_data",
        help=".npz file with an array for each input, samples first; .npy for one input; all samples count "
        "(default: random data)",
    )
    group.add_argument(
        "--calibration_samples",
        type=int,
        metavar="N",
        help="calibrate on N samples of --calibration_data, evenly spread over the file (default: all)",
    )


def _add_benchmark(group: Any) -> None:
    group.add_argument(
        "--backend", help="openvino, onnxruntime, tensorrt, ... (see qdq list; default: openvino, which needs no GPU)"
    )
    group.add_argument("--use_trtexec", action="store_true", help="time with TensorRT's trtexec")
    group.add_argument(
        "--timing_cache",
        default=str(Path(tempfile.gettempdir()) / "trtexec_timing.cache"),
        help="TensorRT's timing cache; other backends have none (default: %(default)s)",
    )
    group.add_argument("--warmup_runs", type=int, help="inferences before timing (default: 50, or the mode's)")
    group.add_argument("--timing_runs", type=int, help="timed inferences (default: 100, or the mode's)")
    group.add_argument(
        "--plugin_libraries", "--plugins", nargs="+", metavar="FILE", help="libraries with operators of TensorRT"
    )
    group.add_argument(TRTEXEC, help="further arguments of trtexec, as one quoted text")
