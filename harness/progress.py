"""Progress reporting: lines and tasks, independent of their display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class ProgressTask(Protocol):
    """A piece of work under way."""

    def advance(self, note: str = "") -> None:
        """Mark one more part as done; `note` describes its result."""
        ...


class Observer(Protocol):
    """Displays the progress of a run. Never raises and never affects measurements."""

    def say(self, text: str) -> None:
        """Show one line."""
        ...

    def work(self, title: str, total: int) -> AbstractContextManager[ProgressTask]:
        """Start a task with `total` parts."""
        ...


class NullProgress:
    """An observer for tests and for use as a library."""

    def say(self, text: str) -> None:
        """Ignore the line."""

    @contextmanager
    def work(self, title: str, total: int) -> Iterator[ProgressTask]:
        """Show nothing."""
        yield self

    def advance(self, note: str = "") -> None:
        """Show nothing."""


def format_incumbent(
    best_ms: float, float_ms: float, *, interleaved: bool, is_float: bool = False, bounded: bool = False
) -> str:
    """Describe the incumbent of a search next to the float model.

    Args:
        float_ms: Latency of the float model on the same scale.
        interleaved: Candidates are timed in turns with the float model.
        is_float: The incumbent is the float model: a lower reading of it is noise and no gain.
        bounded: Only candidates within a bound can be the incumbent.
    """
    if is_float or best_ms >= float_ms:
        return f"nothing faster than float's {float_ms:.3f} ms{' within the bound' if bounded else ''} so far"
    comparison = "interleaved with" if interleaved else "over"
    return f"best {best_ms:.3f} ms, {float_ms / best_ms:.2f}x {comparison} float's {float_ms:.3f} ms"
