"""What is written down: one JSON object a line, schema 1.

Raw samples are always stored; summaries are computed by readers (`harness.statistics`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["SCHEMA_VERSION", "Proposal", "Failed", "JournalLine", "Measured", "Outcome", "TrialResult", "decode_line", "encode_line"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An engine was built and timed.

    Attributes:
        samples_ms: Latency of each inference in the order of measurement, warm-up excluded; of each turn where it was
            timed beside a reference, the machine's pace taken out (`harness.timing.reference_sampling`).
        raw_ms: Of each such turn what the clock said; empty where it was timed alone.
        beside_ms: The reference's turns, before the first of them and after each; of a runoff one a turn.
        discarded_ms: Readings of a first attempt that was repeated; empty as a rule.
        trouble: Why it was repeated; "" where it was not.
        retaken_ms: Readings of other builds, where the first beat the incumbent and so was not believed at once.
        saved: Inferences that racing saved, an estimate.
        conditions: Of the machine at the end: clock in MHz, temperature in °C, load average; those it tells.
        warmup: Inferences before the first reading that counts.
        stable: Warm-up ended in a steady state, and nothing speaks against the readings.
        build_s: Wall-clock of the build; of all builds where there were several.
        measure_s: Wall-clock of warm-up and sampling, of all builds too.
        release_s: Wall-clock of letting go of the engines; 0 in runs of earlier versions, which did not record it.
        evaluate_s: Wall-clock of the evaluator; 0 where it was not asked.
        metrics: What the evaluator found; empty where it was not asked.
        per_item: See `harness.api.Accuracy`.
        info: Facts of the engine from `Artifact.info`.
    """

    samples_ms: tuple[float, ...]
    build_s: float
    measure_s: float
    release_s: float = 0.0
    evaluate_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    per_item: tuple[float, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    discarded_ms: tuple[float, ...] = ()
    trouble: str = ""
    retaken_ms: tuple[tuple[float, ...], ...] = ()
    warmup: int = 0
    stable: bool = True
    saved: int = 0
    conditions: Mapping[str, float] = field(default_factory=dict)
    raw_ms: tuple[float, ...] = ()
    beside_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An engine could not be built, timed or scored.

    Attributes:
        stage: "build", "measure", "evaluate", "timeout" or "crash".
        reason: One line.
        log_tail: The last lines that the runtime printed.
        wall_s: Wall-clock spent until then.
    """

    stage: str
    reason: str
    log_tail: str = ""
    wall_s: float = 0.0


Outcome = Measured | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A proposal, numbered from 0 in ask order.

    Attributes:
        origin: "seed:NAME" for the common seeds, else "searcher".
        duplicate_of: Number of the earlier ask with the same digest (costs no budget), or None.
        searcher_s: What the searcher took for itself, to propose this and to be told what came before; None: not known.
    """

    number: int
    choices: tuple[int, ...]
    digest: str
    origin: str
    duplicate_of: int | None = None
    searcher_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What became of the proposal with this number.

    Attributes:
        elapsed_s: Wall-clock of the run so far, summed over resumed parts.
    """

    number: int
    outcome: Outcome
    elapsed_s: float


JournalLine = Proposal | TrialResult
_LINE_CLASSES: dict[str, type[Any]] = {"asked": Proposal, "told": TrialResult}
_OUTCOME_CLASSES: dict[str, type[Any]] = {"measured": Measured, "failed": Failed}


def encode_line(line: JournalLine) -> str:
    """One line of the journal, without the newline."""
    body = _field_values(line)
    kind = "asked" if isinstance(line, Proposal) else "told"
    if isinstance(line, TrialResult):
        status = "measured" if isinstance(line.outcome, Measured) else "failed"
        body["outcome"] = {"status": status, **_field_values(line.outcome)}
    return json.dumps({"kind": kind, **body}, separators=(",", ":"), allow_nan=False)


def _field_values(record: JournalLine | Outcome) -> dict[str, Any]:
    """Its fields as they are; `dataclasses.asdict` would copy every sample, which took longer than all the rest."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def decode_line(text: str) -> JournalLine:
    """Read one line back.

    Raises:
        ValueError: Not one of ours; the text says what is wrong with it.
    """
    try:
        body = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"nested too deep: {text[:80]}") from error
    if not isinstance(body, dict) or body.get("kind") not in _LINE_CLASSES:
        raise ValueError(f"not a journal line of schema {SCHEMA_VERSION}: {text[:80]}")
    kind = body.pop("kind")
    try:
        if kind == "told":
            outcome = body["outcome"]
            status = outcome.pop("status")
            body["outcome"] = _OUTCOME_CLASSES[status](**_lists_to_tuples(outcome))
        return _LINE_CLASSES[kind](**_lists_to_tuples(body))  # type: ignore[no-any-return]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"journal line of schema {SCHEMA_VERSION} lacks or adds a field ({error}): {text[:80]}") from error


def _lists_to_tuples(body: dict[str, Any]) -> dict[str, Any]:
    for key, value in body.items():
        if type(value) is list:
            body[key] = _list_to_tuple(value)
    return body


def _list_to_tuple(value: list[Any]) -> tuple[Any, ...]:
    if value and type(value[0]) is list:
        return tuple(_list_to_tuple(entry) for entry in value)
    return tuple(value)
