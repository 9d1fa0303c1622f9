"""Wall-clock limit of a task: its division between the phases, and estimates of the time left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from harness.base.progress import TIME_LEFT, format_minutes
from harness.config.sections import Confirmation
from harness.measure.elimination import TURNS_PER_RACING_ROUND
from harness.results.termination import SEARCH_SHARE, PhaseClock

MIN_SEARCH_SHARE = 0.1
"""Smallest share of the limit for the searches, however long the set-up took."""
RECOVERY_SHARE = 0.7
"""Share of the limit after which no further recovery and no further round of the final selection starts."""
MIN_PLAN = Confirmation(builds=3, rounds=4)
"""Smallest confirmation, which is made even if the limit is exceeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """Time limit of a task in `seconds` of wall-clock, with the `clock` of its phases, which includes interrupted runs.

    A step that has begun is finished: a candidate, the recovery of a file, the scores of the finalists. So a task may
    exceed its limit by one step, by the initial placements up to an early answer, and by the smallest confirmation.
    """

    seconds: float
    clock: PhaseClock

    def search_seconds(self, searches: int) -> float:
        """Return the seconds for the next search if this number of searches is left."""
        left_s = SEARCH_SHARE * self.seconds - self.clock.elapsed_s
        return max(left_s, MIN_SEARCH_SHARE * self.seconds) / max(1, searches)

    @property
    def allows_recovery(self) -> bool:
        """Return whether another recovery, or round of the final selection, may start."""
        return self.clock.elapsed_s < RECOVERY_SHARE * self.seconds

    def shorten(self, plan: Confirmation, rows: int, turn_s: float, begun: Confirmation | None = None) -> Confirmation:
        """Return the plan, with fewer builds and rounds (at least `MIN_PLAN`) if it exceeds the remaining time.

        Args:
            plan: Schedule of the experiment's confirmation.
            rows: Number of rows.
            turn_s: Expected seconds of a turn of one row, including its share of the builds.
            begun: Plan of an interrupted confirmation, whose builds and rounds are returned, because a confirmation
                with another plan would start anew.
        """
        if begun is not None:
            return plan.model_copy(update={"builds": begun.builds, "rounds": begun.rounds})
        needed_s = turn_s * (rows + 1) * plan.builds * plan.rounds
        left_s = self.seconds - self.clock.elapsed_s
        if needed_s <= left_s:
            return plan
        rounds = round(plan.rounds * max(left_s, 0) / needed_s * plan.builds / MIN_PLAN.builds)
        fewer = {"builds": MIN_PLAN.builds, "rounds": min(plan.rounds, max(MIN_PLAN.rounds, rounds))}
        return plan.model_copy(update=fewer)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """Estimate of the time until the end of a task while a search runs.

    Attributes:
        evaluations: Number of evaluations of this search and of those that have not begun.
        replayed: Number of evaluations of an interrupted run, which take no time.
        later_s: Expected seconds after the searches, see `seconds_after_searches`.
        limit: Time limit of the task; None: no limit.
        since_s: Reading of the monotonic clock when the search began.
    """

    evaluations: int
    replayed: int
    later_s: float
    limit: TimeLimit | None = None
    since_s: float = field(default_factory=time.monotonic)

    def describe(self, spent: int) -> str:
        """Return the time left after a number of evaluations, with final selection and confirmation; "" if unknown."""
        if spent <= self.replayed or not self.later_s:
            return ""
        pace_s = (time.monotonic() - self.since_s) / (spent - self.replayed)
        left_s = pace_s * (self.evaluations - spent) + self.later_s
        if self.limit is not None:
            left_s = min(left_s, max(0.0, self.limit.seconds - self.limit.clock.elapsed_s))
        return f"about {format_minutes(left_s)} {TIME_LEFT} in all"


def seconds_after_searches(turn_s: float, plan: Confirmation, baselines: int, searches: int) -> float:
    """Estimate the seconds of final selection and confirmation; 0: unknown.

    Args:
        turn_s: Expected seconds of a turn of one row; 0: unknown.
        baselines: Number of confirmed rows that no search finds, without the float model.
        searches: Number of searches; the race halves their candidates after its first round.
    """
    first, *later = TURNS_PER_RACING_ROUND
    raced = searches * plan.candidates if plan.candidates > plan.top_k else 0
    race_turns = first * (raced + 2) + sum(later) * (raced // 2 + 2) if raced else 0
    rows = 2 + baselines + searches * plan.top_k  # the float model has two rows, for the noise floor
    return turn_s * (race_turns + rows * plan.builds * plan.rounds)
