"""Shows a run in a terminal: progress bars with time left, or plain lines where the output is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from harness.run.observe import Step

__all__ = ["Terminal"]


class Terminal:
    """An observer on standard error, so that standard output holds the tables alone."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = sys.stderr.isatty()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not self._live,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print one line above the bars."""
        self._console.print(text, markup=False)

    @contextmanager
    def work(self, title: str, total: int) -> Iterator[Step]:
        """Show a bar while the work goes on; without a terminal a line when it ends."""
        started_s = time.monotonic()
        task = self._progress.add_task(title, total=total, note="")
        step = _Bar(self._progress, task)
        try:
            yield step
        finally:
            self._progress.remove_task(task)
        took_s = time.monotonic() - started_s
        if took_s > 2:
            self.say(f"{title}: {took_s:.0f} s{f', {step.note}' if step.note else ''}")


class _Bar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self.note = ""

    def advance(self, note: str = "") -> None:
        """Move the bar by one."""
        self.note = note or self.note
        self._progress.update(self._task, advance=1, note=self.note)
