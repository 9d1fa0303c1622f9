"""Settings and errors of the front end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.config.precision_names import normalize_float_precision
from harness.errors import UserError

__all__ = ["AutotunerError", "AutotunerNotInitializedError", "Config", "InvalidSchemeError", "parse_dq_dtype"]

QUANT_TYPES = ("int8", "fp8")
DQ_DTYPES = ("float16", "float32", "bfloat16")


class AutotunerError(UserError):
    """Something about an autotuner that its user can mend."""


class AutotunerNotInitializedError(AutotunerError):
    """The autotuner or the benchmark was used before it was initialized."""


class InvalidSchemeError(AutotunerError):
    """There is no scheme, or no region, that this could be about."""


def parse_dq_dtype(text: str) -> str:
    """Return a float type by ModelOpt's name ("float16"), given in any usual spelling."""
    return {"f16": "float16", "f32": "float32", "bf16": "bfloat16"}.get(normalize_float_precision(text), text)


@dataclass
class Config:
    """Settings of an autotuner; names and defaults are those of ModelOpt's, and below them our own.

    Attributes:
        verbose: Log the resolved insertion points of each export.
        performance_threshold: Taken for compatibility and, as there, read by nobody.
        default_q_scale: Scale of every activation where operators that only a plug-in knows keep the model from being
            run for calibration. Else scales come from calibration: equal ones would cancel out and look fast.
        default_q_zero_point: Taken for compatibility; the dialect of the runtime decides about zero points.
        default_quant_type: "int8" or "fp8".
        default_dq_dtype: Type of tensors whose type cannot be inferred: "float16", "float32" or "bfloat16".
        maximum_sequence_region_size: Most nodes of a LEAF that is a sequence.
        minimum_topdown_search_size: A convergence of at least so many nodes is split.
        top_percent_to_mutate: Share of the measured schemes, best first, that parents are drawn from.
        minimum_schemes_to_mutate: Draw from at least so many, as far as there are so many.
        maximum_mutations: Most points that one mutation adds, and removes, of each kind.
        maximum_generation_attempts: Proposals in a row that may be known already before `generate` gives up.
        pattern_cache_minimum_distance: Schemes kept in the cache differ in at least so many points.
        pattern_cache_max_entries_per_pattern: Most schemes of one pattern in the cache.
        backend: Whose dialect the Q/DQ pairs are written in; None: that of the benchmark, without one OpenVINO's.
        backend_params: Parameters of the backend.
        searcher: Proposes schemes; "random_mutation" is the algorithm of ModelOpt.
        seed: Of the searcher.
        calibration_data: An `.npz` file with an array for each input, samples first; None: random data.
        calibration_samples: Number of its samples at most, evenly spread over the file; None: all.
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

    def __post_init__(self) -> None:
        self.default_dq_dtype = parse_dq_dtype(self.default_dq_dtype)
        for name, allowed in (("default_quant_type", QUANT_TYPES), ("default_dq_dtype", DQ_DTYPES)):
            if getattr(self, name) not in allowed:
                raise AutotunerError(f"{name}: one of {', '.join(allowed)}, but got {getattr(self, name)!r}")
        if self.calibration_samples is not None and self.calibration_samples < 1:
            raise AutotunerError(f"calibration_samples: at least 1, but got {self.calibration_samples!r}")
        if not self.default_q_scale > 0:
            raise AutotunerError(f"default_q_scale: above 0, but got {self.default_q_scale!r}")
