"""What an autotuner remembers, as a file: every model that was measured, and the patterns that are done.

Going on is doing it again: the same proposals come up, and those that were measured are not measured twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.compat.modelopt_autotune.common import AutotunerError
from harness.compat.modelopt_autotune.schemes import PatternSchemes
from harness.graph.pattern_cache_io import read_plain_yaml, write_plain_yaml

__all__ = ["AutotuneState", "Measurement", "cache_path", "describe_config_changes", "read_state", "write_state"]

_KIND = "qdq autotuner state"
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What came of one model.

    Attributes:
        latency_ms: None where it could not be measured.
        stderr_ms: Its standard error; 0 where nobody knows.
        signature: Of the pattern under profile when it was measured; "" for the baseline and whole-model starts.
        timestamp: When, in ISO 8601.
        choices: Of the placement, a digit each; "" where nobody knows them.
    """

    latency_ms: float | None
    stderr_ms: float = 0.0
    signature: str = ""
    timestamp: str | None = None
    choices: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneState:
    """Everything that is kept.

    Attributes:
        facts: What must be the same to go on.
        config: The settings, for people.
        beside_float: Models are timed in turns with the float model; what was timed alone does not compare with them.
        current: Signature of the pattern under profile; "" without one.
        measured: By the digest of the placement, in the order of measurement.
    """

    facts: Mapping[str, Any]
    config: Mapping[str, Any]
    baseline_latency_ms: float | None = None
    beside_float: bool = False
    current: str = ""
    measured: Mapping[str, Measurement] = field(default_factory=dict)
    patterns: tuple[PatternSchemes, ...] = ()


def cache_path(state_path: Path) -> Path:
    """Where the pattern cache of a state file is."""
    return state_path.with_name(f"{state_path.stem}_pattern_cache{state_path.suffix}")


def describe_config_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What to say of settings that an earlier part of a run had otherwise.

    Args:
        before: Settings of the state file.
        now: The present ones.
    """
    told = {
        "calibration_data": "models that are written have the scales of the present data",
        "calibration_samples": "models that are written have the scales of the present samples",
        "searcher": "what the other one measured counts",
    }
    for key, sentence in told.items():
        if key in before and before[key] != now[key]:
            yield f"{key} was {before[key]} and is {now[key]}: {sentence}"


def write_state(state: AutotuneState, path: Path) -> None:
    """Replace a state file in one step.

    Raises:
        AutotunerError: It cannot be written; the old one stands.
    """
    body = {
        "kind": _KIND,
        "schema": 1,
        "facts": dict(state.facts),
        "baseline_latency_ms": state.baseline_latency_ms,
        "beside_float": state.beside_float,
        "current_profile_pattern_schemes_signature": state.current or None,
        "config": dict(state.config),
        "measured": {digest: asdict(each) for digest, each in state.measured.items()},
        "patterns": [schemes.to_dict() for schemes in state.patterns],
    }
    try:
        write_plain_yaml(body, path)
    except OSError as error:
        raise AutotunerError(f"{path}: cannot be written: {error.strerror or error}; make room and go on") from error


def read_state(path: Path, facts: Mapping[str, Any]) -> AutotuneState:
    """Read a state file.

    Args:
        facts: What must be the same as when it was written.

    Raises:
        FileNotFoundError: There is no such file.
        AutotunerError: It is none of ours, damaged, or of another model, runtime or setting; the text says which.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    body = read_plain_yaml(path, _MAX_BYTES)
    remedy = "remove the file to start over, or use another --output_dir"
    if body.get("kind") != _KIND or body.get("schema") != 1:
        raise AutotunerError(f"{path}: no state of this autotuner (ModelOpt's cannot be read); {remedy}")
    before = body.get("facts")
    before = before if isinstance(before, dict) else {}
    changed = [
        f"{key} was {before.get(key)!r} and is {value!r}" for key, value in facts.items() if before.get(key) != value
    ]
    if changed:
        raise AutotunerError(f"{path}: made with something else: {'; '.join(changed)}; {remedy}")
    try:
        baseline_ms = body["baseline_latency_ms"]
        return AutotuneState(
            facts=facts,
            config=dict(body["config"]),
            baseline_latency_ms=None if baseline_ms is None else _check_positive(baseline_ms),
            beside_float=body.get("beside_float") is True,
            current=body["current_profile_pattern_schemes_signature"] or "",
            measured={str(digest): _read_measurement(each) for digest, each in body["measured"].items()},
            patterns=tuple(PatternSchemes.from_dict(each) for each in body["patterns"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, AutotunerError) as error:
        raise AutotunerError(f"{path}: damaged ({error}); {remedy}") from error


def _read_measurement(body: Mapping[str, Any]) -> Measurement:
    latency_ms = body["latency_ms"]
    stderr_ms = body.get("stderr_ms", 0.0)  # what older files do not have
    return Measurement(
        latency_ms=None if latency_ms is None else _check_positive(latency_ms),
        stderr_ms=_check_positive(stderr_ms) if stderr_ms else 0.0,
        signature=str(body["signature"]),
        timestamp=body["timestamp"],
        choices=str(body.get("choices", "")),  # nor this
    )


def _check_positive(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"a latency is a positive number, but got {value!r}")
    return float(value)
