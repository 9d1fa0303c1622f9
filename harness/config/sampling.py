"""How engines are timed, and what they may take: the keys `sampling`, `confirmation` and `limits` of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Confirmation", "Limits", "TurnSchedule", "Sampling"]


class _TimingSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Sampling(_TimingSection):
    """How long one engine is timed during a search; one that is clearly slower than the incumbent gets less.

    Attributes:
        warmup_ms: Run at least so long before the first sample counts.
        min_samples: At least so many samples.
        max_samples: At most so many.
        max_ms: Stop after so long, when min_samples are there.
        target: Stop when the 95 % interval of the median is narrower than this share of it.
        beside: Whether a candidate is timed in turns with the float model, which takes the machine's pace out of its
            readings and twice the time; "auto": where the float model's turns before the searches scatter by more than
            2 %.
    """

    warmup_ms: Annotated[float, Field(ge=0)] = 50.0
    min_samples: Annotated[int, Field(ge=3)] = 11
    max_samples: Annotated[int, Field(ge=3)] = 200
    max_ms: Annotated[float, Field(gt=0)] = 400.0
    target: Annotated[float, Field(gt=0, lt=1)] = 0.01
    beside: Literal["auto", "always", "never"] = "auto"


class TurnSchedule(_TimingSection):
    """How often rows are built afresh and timed in turns.

    Attributes:
        builds: Fresh builds of each row.
        rounds: Rounds within one build; every row is sampled once a round, in random order.
        samples: Inferences of one row in one round, at least; short ones go on for 50 ms.
    """

    builds: Annotated[int, Field(ge=1)] = 1
    rounds: Annotated[int, Field(ge=2)] = 8
    samples: Annotated[int, Field(ge=3)] = 3


class Confirmation(TurnSchedule):
    """How winners and baselines are timed again: fresh processes, fresh builds, interleaved.

    Attributes:
        top_k: Best placements of each search that are confirmed.
        contenders: Best placements of each search that meet in the runoff, which picks the `top_k`; 1: none, the lowest
            reading of the search is believed.
    """

    builds: Annotated[int, Field(ge=3)] = 5
    rounds: Annotated[int, Field(ge=2)] = 20
    top_k: Annotated[int, Field(ge=1)] = 1
    contenders: Annotated[int, Field(ge=1)] = 4


class Limits(_TimingSection):
    """What one candidate, or the worker that has it, may take before it counts as failed; 1 GB is 10^9 bytes."""

    build_s: Annotated[float, Field(gt=0)] = 300.0
    measure_s: Annotated[float, Field(gt=0)] = 120.0
    evaluate_s: Annotated[float, Field(gt=0)] = 1800.0
    memory_gb: Annotated[float, Field(gt=0)] = 16.0
