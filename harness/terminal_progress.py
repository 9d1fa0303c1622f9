"""Displays of a run: progress bars in a terminal or a notebook, plain lines in other outputs, or JSON events."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
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

from harness.progress import TIME_LEFT, ProgressTask
from harness.text import printable, printable_lines

MIN_SHARE_FOR_ETA = 0.05
"""Share of the steps before which no remaining time is shown, because the first step may include a build."""


class TerminalProgress:
    """Observer that writes to standard error, so that standard output has only the tables.

    Args:
        every_s: Seconds between progress lines if the output is no terminal.
    """

    def __init__(self, *, every_s: float = 30.0) -> None:
        self._every_s = every_s
        self._console = Console(stderr=True, highlight=False)
        self._live = sys.stderr.isatty() or (self._console.is_jupyter and find_spec("ipywidgets") is not None)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=self._console,
            disable=not self._live,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print one line above the bars."""
        self._console.print(printable_lines(text), markup=False, soft_wrap=True)

    @contextmanager
    def work(self, title: str, total: int) -> Iterator[ProgressTask]:
        """Show a bar during the work, or lines if the output is no terminal, and a last line after more than 2 s."""
        started_s = time.monotonic()
        task = self._progress.add_task(printable(title), total=total, note="")
        step = _ProgressBar(self._progress, task)
        plain = _ProgressLines(self.say, title, total, self._every_s)
        try:
            yield step if self._live else plain
        finally:
            self._progress.remove_task(task)
        took_s = time.monotonic() - started_s
        if took_s > 2:
            note = step.note or plain.note
            self.say(f"{title}: {took_s:.0f} s{f', {note}' if note else ''}")


class _ProgressBar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self.note = ""

    def advance(self, note: str = "") -> None:
        """Move the bar by one."""
        self.note = note or self.note
        self._progress.update(self._task, advance=1, note=printable(self.note))


class _ProgressLines:
    def __init__(self, say: Callable[[str], None], title: str, total: int, every_s: float) -> None:
        self._say = say
        self._title = title
        self._total = total
        self._every_s = every_s
        self._done = 0
        self._started_s = self._printed_s = time.monotonic()
        self.note = ""

    def advance(self, note: str = "") -> None:
        """Count one more part, and print a line every `every_s` seconds, except for the last part."""
        self.note = note or self.note
        self._done += 1
        now_s = time.monotonic()
        if now_s - self._printed_s < self._every_s or self._done >= self._total:
            return
        self._printed_s = now_s
        left_s = (now_s - self._started_s) / self._done * (self._total - self._done)
        minutes, seconds = divmod(round(left_s), 60)
        line = f"{self._title}: {self._done}/{self._total}"
        # A time limit may end the step early: the estimate in the note knows it, that of the step would contradict it.
        if self._done >= MIN_SHARE_FOR_ETA * self._total and TIME_LEFT not in self.note:
            line += f", about {minutes}:{seconds:02d} {TIME_LEFT} in this step"
        self._say(f"{line}, {self.note}" if self.note else line)


class EventProgress:
    """Observer that prints each event as one line of JSON on standard error.

    An event has `time_s` (seconds since the start) and `event` ("line", "start", "step" or "end"). A "line" has `text`;
    the others have the title of the work as `work`, and `total`, `done` and `note` as far as they apply.
    """

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        """Print a line of text."""
        self._print("line", text=text)

    @contextmanager
    def work(self, title: str, total: int) -> Iterator[ProgressTask]:
        """Print the start, each step and the end of work of `total` steps; the context has `advance` for each step."""
        task = _EventTask(self._print, title, total)
        self._print("start", work=title, total=total)
        yield task
        self._print("end", work=title, done=task.done, total=total)

    def _print(self, event: str, **facts: object) -> None:
        time_s = round(time.monotonic() - self._start_s, 3)
        print(json.dumps({"time_s": time_s, "event": event, **facts}), file=sys.stderr, flush=True)


class _EventTask:
    def __init__(self, report: Callable[..., None], title: str, total: int) -> None:
        self._report, self._title, self._total = report, title, total
        self.done = 0

    def advance(self, note: str = "") -> None:
        """Print one step."""
        self.done += 1
        self._report("step", work=self._title, done=self.done, total=self._total, note=note)
