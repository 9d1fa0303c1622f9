"""Settings of an autotuner in Python and on the command line, with ModelOpt's names and defaults, and its errors."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.base.errors import MAX_COUNT, UserError
from harness.config.sections import normalize_float_precision

QUANT_TYPES = ("int8", "fp8")
DQ_DTYPES = ("float16", "float32", "bfloat16")
_PRESET_KEYS = ("schemes_per_region", "warmup_runs", "timing_runs")
_PRESETS = {"quick": (30, 10, 50), "default": (50, 50, 100), "extensive": (200, 50, 200)}  # of ModelOpt 0.47
MODE_PRESETS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {mode: MappingProxyType(dict(zip(_PRESET_KEYS, preset, strict=True))) for mode, preset in _PRESETS.items()}
)
MIN_TIMING_RUNS = 3  # the fewest readings with a median and an interval
_COUNT_RANGES = {
    **dict.fromkeys(("schemes_per_region", "timing_runs", "max_evals", "calibration_samples"), (1, MAX_COUNT)),
    "warmup_runs": (0, MAX_COUNT),
    "seed": (0, 2**63 - 1),
}
TRTEXEC_FLAG = "--trtexec_benchmark_args"


class AutotunerError(UserError):
    """Mistake in the use of an autotuner."""


class AutotunerNotInitializedError(AutotunerError):
    """The autotuner or the benchmark was used before it was initialized."""


class InvalidSchemeError(AutotunerError):
    """The scheme or region does not exist or is malformed."""


def parse_dq_dtype(text: str) -> str:
    """Return ModelOpt's name of a float type ("float16") from any usual spelling."""
    return {"f16": "float16", "f32": "float32", "bf16": "bfloat16"}.get(normalize_float_precision(text), text)


@dataclass
class Config:
    """Settings of an autotuner, with ModelOpt's names and defaults; those from `backend` on are additions.

    Attributes:
        verbose: Log the resolved insertion points of each export.
        performance_threshold: Accepted for compatibility, without effect in ModelOpt, too.
        default_q_scale: Scale of every activation if plug-in operators prevent a calibration. Otherwise scales come
            from calibration, as runtimes remove adjacent pairs of equal scales, which then seem fast.
        default_q_zero_point: Accepted for compatibility, without effect: the dialect has the zero points.
        default_quant_type: "int8" or "fp8".
        default_dq_dtype: Type of tensors whose type cannot be inferred: "float16", "float32" or "bfloat16".
        maximum_sequence_region_size: Maximum number of nodes of a LEAF that is a sequence.
        minimum_topdown_search_size: Number of nodes from which branches and the node that joins them are split.
        top_percent_to_mutate: Share of the measured schemes, best first, that parents are drawn from.
        minimum_schemes_to_mutate: Minimum number of schemes that parents are drawn from.
        maximum_mutations: Maximum number of points of each kind that a mutation adds, and removes.
        maximum_generation_attempts: Known proposals in a row after which `generate` gives up.
        pattern_cache_minimum_distance: Minimum number of points in which cached schemes differ.
        pattern_cache_max_entries_per_pattern: Maximum number of cached schemes of one pattern.
        backend: Benchmarker whose dialect the Q/DQ pairs have; None: that of the benchmark, or OpenVINO.
        backend_params: Parameters of the backend.
        searcher: Searcher of schemes; "random_mutation" is ModelOpt's algorithm.
        seed: Seed of the searcher.
        calibration_data: An `.npz` file with an array for each input, samples first; None: random data.
        calibration_samples: Maximum number of its samples, evenly spread over the file; None: all.
        calibration_method: Range estimator of activations.
        weight_method: Range estimator of weights.
        depthwise: Scales of the data of depthwise convolutions: one ("tensor"), or one for each channel ("channel").
        symmetric: Whether INT8 activations have zero point 0; None: the dialect decides.
    """

    verbose: bool = False
    performance_threshold: float = 1.02
    default_q_scale: float = 0.1
    default_q_zero_point: int = 0
    default_quant_type: str = "int8"
    default_dq_dtype: str = "float32"
    maximum_sequence_region_size: int = 10
    minimum_topdown_search_size: int = 10
    top_percent_to_mutate: float = 0.1
    minimum_schemes_to_mutate: int = 10
    maximum_mutations: int = 3
    maximum_generation_attempts: int = 100
    pattern_cache_minimum_distance: int = 4
    pattern_cache_max_entries_per_pattern: int = 32
    backend: str | None = None
    backend_params: Mapping[str, Any] = field(default_factory=dict)
    searcher: str = "random_mutation"
    seed: int = 0
    calibration_data: str | None = None
    calibration_samples: int | None = None
    calibration_method: str = "minmax"
    weight_method: str = "max"
    depthwise: str = "tensor"
    symmetric: bool | None = None

    def __post_init__(self) -> None:
        self.default_dq_dtype = parse_dq_dtype(self.default_dq_dtype)
        for name, allowed in (("default_quant_type", QUANT_TYPES), ("default_dq_dtype", DQ_DTYPES)):
            if getattr(self, name) not in allowed:
                raise AutotunerError(f"{name}: one of {', '.join(allowed)}, but got {getattr(self, name)!r}")
        if self.calibration_samples is not None and self.calibration_samples < 1:
            raise AutotunerError(f"calibration_samples: at least 1, but got {self.calibration_samples!r}")
        if not self.default_q_scale > 0:
            raise AutotunerError(f"default_q_scale: above 0, but got {self.default_q_scale!r}")


def check_counts(options: argparse.Namespace) -> None:
    """Raise `AutotunerError` for a number that is too small or too large."""
    for name, (least, most) in _COUNT_RANGES.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most:,}"
            raise AutotunerError(f"--{name} is {limit}, but got {value}")


def select_mode_preset(options: argparse.Namespace) -> dict[str, int]:
    """Return schemes_per_region, warmup_runs and timing_runs, each from its flag, else from the mode."""
    overrides = {name: value for name in _PRESET_KEYS if (value := getattr(options, name)) is not None}
    return {**MODE_PRESETS[options.mode], **overrides}


def ineffective_flags(options: argparse.Namespace, taken: Collection[str], *, typed: bool) -> Iterator[str]:
    """Yield the flags of a command line that have no effect, with the reason.

    Args:
        taken: Parameters that were passed to the backend.
        typed: Whether the type of every tensor that may be quantized is known.
    """
    if options.timing_cache != get_parser().get_default("timing_cache") and "timing_cache_file" not in taken:
        yield f"--timing_cache {options.timing_cache}: this backend has no timing cache"
    if options.calibration_samples is not None and options.calibration_data is None:
        yield "--calibration_samples: needs --calibration_data"
    if typed and options.default_dq_dtype != "float32":
        yield f"--default_dq_dtype {options.default_dq_dtype}: all types of this model are known"
    if options.timing_runs is not None and options.timing_runs < MIN_TIMING_RUNS:
        yield f"--timing_runs {options.timing_runs}: {MIN_TIMING_RUNS} are timed, the fewest that have a median"
    if options.mode != "default" and all(getattr(options, name) is not None for name in _PRESET_KEYS):
        yield f"--mode {options.mode}: each of its figures is given by a flag of its own"


def parse_arguments(given: Sequence[str], prog: str) -> argparse.Namespace:
    """Parse a command line; a mistake ends the process, as in argparse."""
    joined: list[str] = []
    for argument in given:  # argparse takes a value such as --verbose for an option
        if joined and joined[-1] == TRTEXEC_FLAG:
            joined[-1] = f"{TRTEXEC_FLAG}={argument}"
        else:
            joined.append(argument)
    return get_parser(prog).parse_args(joined)


def get_parser(prog: str = "python -m harness.compat.modelopt_autotune") -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,  # a misspelled flag is refused at once, not after the run
        description="Finds by measured latency where Q/DQ pairs belong in an ONNX model.",
        epilog=f"Example: {prog} --onnx_path model.onnx --output_dir out/model. "
        "An interrupted run resumes when the same command is given again.",
    )
    parser.add_argument("--verbose", "-v", action="store_true", help="show log messages of all parts")
    for title, flags in _FLAGS.items():
        group = parser.add_argument_group(title)
        for names, options in flags.items():
            group.add_argument(*names.split(), **options)
        if title == "Model and Output":
            add_sizes(group)
    return parser


def add_sizes(group: Any) -> None:
    """Add the flags `--shape` and `--dim`, which fix dynamic inputs, to a parser or a group of arguments."""
    group.add_argument(
        "--shape", action="append", metavar="NAME:1x3x224x224", help="static shape of a dynamic input; repeat per input"
    )
    group.add_argument(
        "--dim",
        action="append",
        metavar="SYMBOL=128",
        help="size of a dynamic dimension, by its symbol; repeat per symbol (default: 1 for the batch)",
    )


_DEFAULT = "(default: %(default)s)"
REGION_GROUP = "ModelOpt's procedure, region by region (any of these flags selects it)"
_FLAGS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "Model and Output": {
        "--onnx_path -m": {"required": True, "help": "ONNX file; also zoo:NAME or assets:PATH"},
        "--at": {
            "action": "append",
            "metavar": "SYMBOL=8[,...][:WEIGHT]",
            "help": "time every model at these sizes of dynamic dimensions; repeat for several, whose weighted mean "
            "counts (default weight: 1)",
        },
        "--at_objective": {
            "choices": ("weighted", "worst"),
            "help": "with --at: weighted mean, or the shape with the least speedup (default: weighted)",
        },
        "--output_dir -o --out": {"default": "./autotuner_output", "help": f"folder of the results {_DEFAULT}"},
        "--json": {"action": "store_true", "help": "print the answer and the tables as JSON"},
    },
    "Search": {
        "--searcher": {
            "help": "searcher of the whole model, see qdq list (default: auto; in the procedure random mutation, "
            "region by region)"
        },
        "--max_evals --evaluations": {
            "type": int,
            "help": "maximum number of measured models (default: 50; in the procedure no limit)",
        },
        "--start": {
            "action": "append",
            "metavar": "FILE",
            "help": "start from this Q/DQ file of any tool too, or from a folder to deploy, and compare with it; its "
            "ranges are used without --calibration_data; repeat for several",
        },
        "--baseline": {
            "action": "append",
            "metavar": "NAME",
            "help": "row to compare with, a rule or a tool: linear, nncf_ptq, ort_static, ...; repeat for several",
        },
        "--max_minutes": {
            "type": float,
            "help": "limit on the whole run, recovery and confirmation included (default: none)",
        },
        "--seed": {"type": int, "default": 0, "help": f"seed of the searcher {_DEFAULT}"},
    },
    "Quantization": {
        "--quant_type": {"choices": QUANT_TYPES, "default": "int8", "help": _DEFAULT},
        "--calibration_data --calibration": {
            "help": ".npz file with an array for each input, samples first; .npy for one input; all samples count; "
            "in qdq autotune also a folder of such files, with samples of different length (default: random data)"
        },
        "--calibration_samples": {
            "type": int,
            "metavar": "N",
            "help": "calibrate on N samples of --calibration_data, evenly spread over the file (default: all)",
        },
        "--calibration_method": {
            "default": "minmax",
            "help": f"range estimator of activations, see qdq list {_DEFAULT}",
        },
        "--weight_method": {"default": "max", "help": f"range estimator of weights, see qdq list {_DEFAULT}"},
        "--depthwise": {
            "choices": ("tensor", "channel"),
            "default": "tensor",
            "help": f"scales of the INT8 data of depthwise convolutions: one, or one for each channel {_DEFAULT}",
        },
        "--symmetric": {
            "action": argparse.BooleanOptionalAction,
            "help": "INT8 activations with zero point 0 (default: as the runtime takes them)",
        },
    },
    "Accuracy": {
        "--max_drop --max-drop": {
            "type": float,
            "metavar": "POINTS",
            "help": "largest loss of the metric in points (0.5 is 0.005): the run is that of qdq run, with recovery",
        },
        "--test_data": {
            "metavar": "FILE",
            "help": ".npz file, or folder of them, of labelled samples for --max_drop",
        },
        "--test_labels": {"default": "labels", "help": f"array of --test_data with the labels {_DEFAULT}"},
        "--metric": {"default": "top1", "help": f"evaluator, see qdq list {_DEFAULT}"},
    },
    "Benchmark": {
        "--backend": {
            "help": "openvino, onnxruntime, tensorrt, ... (see qdq list; default: openvino, which needs no GPU)"
        },
        "--param": {
            "action": "append",
            "metavar": "NAME=VALUE",
            "help": "parameter of the backend, for instance threads=2; repeat per parameter",
        },
        "--wait": {
            "type": float,
            "metavar": "SECONDS",
            "help": "limit of a wait for other runs that time on this machine (default: none)",
        },
    },
    REGION_GROUP: {
        "--mode": {
            "choices": list(MODE_PRESETS),
            "default": "default",
            "help": "preset of schemes_per_region, warmup_runs and timing_runs; their flags override it "
            "(default: default)",
        },
        "--schemes_per_region -s": {"type": int, "help": "schemes measured for a region (default: 50, or the mode's)"},
        "--pattern_cache": {"type": Path, "help": "pattern cache of an earlier run, for a warm start"},
        "--qdq_baseline": {"help": "Q/DQ model made from this model, for the initial design"},
        "--state_file": {"type": Path, "help": "state file (default: OUTPUT_DIR/autotuner_state.yaml)"},
        "--node_filter_list": {
            "help": "file of wildcards, one a line; regions without a node of such a name stay float"
        },
        "--default_dq_dtype": {
            "type": parse_dq_dtype,
            "choices": DQ_DTYPES,
            "default": "float32",
            "help": f"type of tensors whose type cannot be inferred {_DEFAULT}",
        },
        "--use_trtexec": {"action": "store_true", "help": "time with TensorRT's trtexec"},
        "--timing_cache": {
            "default": str(Path(tempfile.gettempdir()) / "trtexec_timing.cache"),
            "help": f"TensorRT's timing cache; other backends have none {_DEFAULT}",
        },
        "--warmup_runs": {"type": int, "help": "inferences before timing (default: 50, or the mode's)"},
        "--timing_runs": {"type": int, "help": "timed inferences (default: 100, or the mode's)"},
        "--plugin_libraries --plugins": {
            "nargs": "+",
            "metavar": "FILE",
            "help": "libraries with operators of TensorRT",
        },
        TRTEXEC_FLAG: {"help": "further arguments of trtexec, as one quoted text"},
    },
}
REGION_FLAGS = frozenset(name for names in _FLAGS[REGION_GROUP] for name in names.split())
