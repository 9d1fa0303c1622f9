"""The fastest of a walk meet before one of them is delivered: the lowest of many readings is a lucky one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.api import Candidate
from harness.measure.confirm import OpenEngines, Row
from harness.measure.race import HEATS
from harness.run.contest import Contest, read_speedups
from harness.run.heats import FIRST, race
from harness.run.observe import Observer

__all__ = ["Runoff", "fastest"]

BASELINE = "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runoff:
    """Where rivals meet.

    Attributes:
        path: Takes every turn; what is there of the same rivals and facts is not timed again.
        facts: What a record depends on beside the rivals, as JSON has it.
    """

    path: Path
    facts: Mapping[str, Any]
    open_engines: OpenEngines
    observer: Observer


def fastest(rivals: Sequence[Candidate], baseline: Candidate, runoff: Runoff) -> tuple[str, float]:
    """Digest of the one that wins the race (`harness.run.heats`), and its speedup there; "" where none came through.

    Args:
        baseline: The float model, which takes its turn beside them.

    Raises:
        UserError: The baseline fails, or the record cannot be written.
    """
    rows = tuple(Row(name=rival.digest, candidate=rival) for rival in rivals)
    names = [row.name for row in rows]
    contest = Contest(
        name="runoff",
        path=runoff.path,
        header={"rows": sorted(names), "heats": list(HEATS), **runoff.facts},
        baseline=Row(name=BASELINE, candidate=baseline),
        rows=rows,
        plan=FIRST,
    )
    (left,) = race(contest, {"all": names}, 1, runoff.open_engines, runoff.observer).values()
    speedups = read_speedups(runoff.path, BASELINE)
    won = max(left or speedups, key=speedups.__getitem__, default="")  # who was beaten, where all others failed
    return won, speedups.get(won, 0.0)
