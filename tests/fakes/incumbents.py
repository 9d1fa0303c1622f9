"""Incumbents of a journal, in order."""

from collections.abc import Iterable, Iterator

from harness.results.journal import JournalEntry
from harness.results.search_log import Evaluation, Goal, is_new_incumbent, iter_evaluations


def iter_incumbents(entries: Iterable[JournalEntry], goal: Goal) -> Iterator[Evaluation]:
    """Yield each evaluation that became the incumbent, in order."""
    best: Evaluation | None = None
    for trial in iter_evaluations(entries, goal):
        if is_new_incumbent(trial, best):
            best = trial
            yield trial
