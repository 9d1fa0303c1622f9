"""Interface of progress reports, without a display; `harness.base.terminal_progress` has displays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

TIME_LEFT = "min left"
"""Words in a note that has the time left of more than its own step."""


class ProgressTask(Protocol):
    """Progress of work with a known number of steps."""

    def advance(self, note: str = "") -> None:
        """Count one more step as done; `note` describes its result."""
        ...


class Observer(Protocol):
    """Display of the progress of a run. It never raises and never affects measurements."""

    def say(self, text: str) -> None:
        """Show one line."""
        ...

    def work(self, title: str, total: int) -> AbstractContextManager[ProgressTask]:
        """Return a context manager for work of `total` steps; its value has `advance`, which is called for each."""
        ...


class NullProgress:
    """Observer that shows nothing."""

    def say(self, text: str) -> None:
        """Ignore the line."""

    @contextmanager
    def work(self, title: str, total: int) -> Iterator[ProgressTask]:
        """Show nothing."""
        yield self

    def advance(self, note: str = "") -> None:
        """Show nothing."""


def format_minutes(seconds: float) -> str:
    """Return a duration as minutes and seconds: "1:05"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def format_incumbent(
    best_ms: float, float_ms: float, *, interleaved: bool, is_float: bool = False, bounded: bool = False
) -> str:
    """Describe the latency of a search's incumbent and its speedup over the float model in one phrase.

    For instance "best 1.500 ms, 2.00x over float's 3.000 ms".

    Args:
        best_ms: Latency of the incumbent.
        float_ms: Latency of the float model, measured in the same way.
        interleaved: Whether candidates are timed in turns with the float model.
        is_float: Whether the incumbent is the float model; a lower reading of it is noise and no gain.
        bounded: Whether only candidates within a bound on accuracy can be the incumbent.
    """
    if is_float or best_ms >= float_ms:
        return f"nothing faster than float's {float_ms:.3f} ms{' within the bound' if bounded else ''} so far"
    comparison = "interleaved with" if interleaved else "over"
    return f"best {best_ms:.3f} ms, {float_ms / best_ms:.2f}x {comparison} float's {float_ms:.3f} ms"
