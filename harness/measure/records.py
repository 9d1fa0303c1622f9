"""Lines of a search's journal: proposals and results, one JSON object each (schema 2).

Results contain all samples; readers of a journal compute summaries from them (`harness.base.statistics`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from harness.base.files import first_problem
from harness.base.paths import hide_paths

MAIN_BENCHMARKER = "main"  # name of the default benchmarker and of the default evaluator

SCHEMA_VERSION = 2
#: Types of numbers in records; readers refuse other values, also text that could be converted to a number.
LatencyMs = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
#: Lists in records. Validation stops at the first wrong entry, because an error about an entry takes 1 kB.
Readings = Annotated[tuple[LatencyMs, ...], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Outcome of an engine that was built and timed.

    Attributes:
        samples_ms: Latency of each inference in order, without warm-up. If the engine was timed in turns with a
            reference engine, the latency of each turn, corrected for drift (`harness.measure.sampling`).
        raw_ms: Latency of each of these turns before the correction; empty without a reference engine.
        reference_ms: Latencies of the reference engine: before the first turn and after each turn; in a final selection
            one per turn.
        discarded_ms: Samples of a first attempt that was disturbed and repeated; usually empty.
        disturbance: Reason for the repetition, or "".
        rebuilt_ms: Readings of further builds, taken because the first build beat the incumbent.
        saved: Estimated number of inferences that racing saved.
        conditions: Readings of the machine after sampling, for instance clock in MHz, temperature in °C, load average.
        warmup: Inferences before the first sample.
        stable: Whether warm-up reached a steady state and no check rejects the samples.
        build_s: Wall-clock seconds of the builds.
        measure_s: Wall-clock seconds of warm-up and sampling of all builds.
        release_s: Wall-clock seconds of closing the engines; 0 in older files.
        evaluate_s: Wall-clock seconds of the evaluator; 0 if it did not run.
        metrics: Scores by name; empty if the evaluator did not run.
        per_item: Value of the evaluator's metric for each image; empty if the metric is no mean over images.
        mixable: `harness.plugins.api.Accuracy.mixable`; "" unless cross-fitting estimates the loss of the selected
            placement.
        info: `harness.plugins.api.Artifact.info` of the engine.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    status: Literal["measured"] = "measured"
    samples_ms: Readings
    build_s: Seconds
    measure_s: Seconds
    release_s: Seconds = 0.0
    evaluate_s: Seconds = 0.0
    metrics: Mapping[str, Finite] = field(default_factory=dict)
    per_item: Annotated[tuple[Finite, ...], Field(fail_fast=True)] = ()
    mixable: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    discarded_ms: Readings = ()
    disturbance: str = ""
    rebuilt_ms: Annotated[tuple[Readings, ...], Field(fail_fast=True)] = ()
    warmup: Count = 0
    stable: bool = True
    saved: Count = 0
    conditions: Mapping[str, Finite] = field(default_factory=dict)
    raw_ms: Readings = ()
    reference_ms: Readings = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Outcome of an engine that could not be built, timed or scored.

    Attributes:
        stage: "build", "measure", "evaluate", "timeout" or "crash".
        reason: Error message on one line.
        log_tail: Last lines that the runtime printed.
        wall_s: Wall-clock seconds until the failure.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    status: Literal["failed"] = "failed"
    stage: str
    reason: str
    log_tail: str = ""
    wall_s: Seconds = 0.0

    def without_paths(self) -> Failed:
        """Return the failure without folders of this machine in its texts; see `harness.base.paths.hide_paths`."""
        return replace(self, reason=hide_paths(self.reason), log_tail=hide_paths(self.log_tail))


Outcome = Measured | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Placement to evaluate; `number` counts the proposals of a search from 0.

    Attributes:
        origin: "initial:NAME" for the initial design, else "searcher".
        duplicate_of: Number of the earlier proposal with the same digest (costs no budget), or None.
        searcher_s: Seconds that the searcher took for this proposal and the results before it; None: unknown.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    kind: Literal["proposal"] = "proposal"
    number: Count
    choices: Annotated[tuple[Count, ...], Field(fail_fast=True)]
    digest: str
    origin: str
    duplicate_of: Count | None = None
    searcher_s: Seconds | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Outcome of the proposal with the same number.

    Attributes:
        elapsed_s: Wall-clock seconds of the search so far, summed over resumed runs.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    kind: Literal["result"] = "result"
    number: Count
    outcome: Annotated[Outcome, Field(discriminator="status")]
    elapsed_s: Seconds


JournalLine = Proposal | TrialResult
_LINE: TypeAdapter[JournalLine] = TypeAdapter(Annotated[JournalLine, Field(discriminator="kind")])


def encode_line(line: JournalLine) -> str:
    """Return the JSON text of one journal line, without checksum and newline."""
    return json.dumps(line, default=field_values, separators=(",", ":"), allow_nan=False)


def field_values(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; unlike `dataclasses.asdict` it copies no samples."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


def decode_line(text: str | bytes) -> JournalLine:
    """Read one journal line.

    Raises:
        ValueError: The text is no journal line of this schema.
    """
    raw = text.encode() if isinstance(text, str) else text
    try:
        if b"\\ud" in raw:  # lone surrogates, as in messages of plug-ins, are no JSON to pydantic
            raw = json.dumps(json.loads(raw), ensure_ascii=False).encode(errors="replace")
        return _LINE.validate_json(raw)
    except ValidationError as error:
        problem = first_problem(error, skipped=1)
        start = raw[:80].decode(errors="replace")
        raise ValueError(f"not a journal line of schema {SCHEMA_VERSION} ({problem}): {start!r}") from error
