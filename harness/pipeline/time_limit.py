"""Limit on the wall-clock of a task: how its phases share it."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.sections import Confirmation
from harness.results_dir.phases import PhaseClock
from harness.selection.confirmation import NOISE_FLOOR_SCHEDULE

__all__ = ["TimeLimit"]

SEARCH_SHARE = 0.5
"""Share of the limit at which searches end; the noise floor, the calibration and the float model's score count."""
MIN_SEARCH_SHARE = 0.1
"""Share that searches get in any case, if the set-up took longer."""
RECOVERY_SHARE = 0.7
"""Share of the limit from which no further file is recovered."""
MIN_PLAN = Confirmation(builds=3, rounds=4)
"""Least confirmation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """Limit of a task, with the clock of its phases, which counts interrupted runs too.

    What has begun ends: a candidate, a file that is recovered, the scores of the finalists. So a task may take longer
    by one of them, and by the least confirmation.

    Attributes:
        seconds: Of the whole task.
    """

    seconds: float
    clock: PhaseClock

    def search_seconds(self, searches: int) -> float:
        """Return the time of the next of a number of searches."""
        left_s = SEARCH_SHARE * self.seconds - self.clock.elapsed_s
        return max(left_s, MIN_SEARCH_SHARE * self.seconds) / max(1, searches)

    @property
    def allows_recovery(self) -> bool:
        """Return whether another file may be recovered."""
        return self.clock.elapsed_s < RECOVERY_SHARE * self.seconds

    def shorten(self, plan: Confirmation, rows: int, begun: Confirmation | None = None) -> Confirmation:
        """Return a plan with fewer builds and rounds if the whole one would take longer than the remaining time.

        Args:
            rows: Number of rows; a turn of each takes as long as one of the noise floor.
            begun: Plan of an interrupted confirmation, which is kept, as another one would start anew.
        """
        if begun is not None:
            return plan.model_copy(update={"builds": begun.builds, "rounds": begun.rounds})
        floor_s = self.clock.seconds_of("noise floor")
        turns = NOISE_FLOOR_SCHEDULE.builds * NOISE_FLOOR_SCHEDULE.rounds
        needed_s = floor_s / 2 * (rows + 1) * plan.builds * plan.rounds / turns
        left_s = self.seconds - self.clock.elapsed_s
        if needed_s <= left_s:
            return plan
        rounds = round(plan.rounds * max(left_s, 0) / needed_s * plan.builds / MIN_PLAN.builds)
        fewer = {"builds": MIN_PLAN.builds, "rounds": min(plan.rounds, max(MIN_PLAN.rounds, rounds))}
        return plan.model_copy(update=fewer)
