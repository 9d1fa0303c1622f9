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
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from harness.base.progress import TIME_LEFT, ProgressTask, format_minutes
from harness.base.text import printable, printable_lines, truncate

MIN_SHARE_FOR_ETA = 0.05
"""Share of the steps before which no remaining time is shown, because the first step may include a build."""
LINE_WIDTH, TITLE_WIDTH, BAR_WIDTH = 80, 30, 10


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
            BarColumn(bar_width=BAR_WIDTH),
            _LineColumn(self._console),
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
        printed_s = time.monotonic()

        def show(step: _ProgressStep) -> None:
            nonlocal printed_s
            self._progress.update(task, completed=step.done)
            if not self._live and step.changed_s - printed_s >= self._every_s and step.done < total:
                printed_s = step.changed_s
                self.say(step.line(LINE_WIDTH))

        step = _ProgressStep(title, total, show)
        task = self._progress.add_task("", total=total, step=step)
        try:
            yield step
        finally:
            self._progress.remove_task(task)
        took_s = time.monotonic() - step.started_s
        if took_s > 2:
            self.say(f"{title}: {took_s:.0f} s{f', {step.note}' if step.note else ''}")


class _ProgressStep:
    """Progress of work of `total` steps; `show` is called with it after each."""

    def __init__(self, title: str, total: int, show: Callable[[_ProgressStep], None]) -> None:
        self.title, self.total, self._show = title, total, show
        self.note, self.last_note, self.done = "", "", 0
        self.started_s = self.changed_s = time.monotonic()

    def advance(self, note: str = "") -> None:
        """Count one more step."""
        self.note, self.last_note, self.done, self.changed_s = note or self.note, note, self.done + 1, time.monotonic()
        self._show(self)

    def line(self, width: int) -> str:
        """Return title, steps, time left and note in at most `width` characters; the note is cut first."""
        notes = self.note.split(", ") if self.note else []
        # A time limit may end the step early: the estimate in the note knows it, that of the step would contradict it.
        times = [part for part in notes if TIME_LEFT in part]
        if not times:
            # From the mean step, or the time since the start; a step that takes longer prolongs the estimate.
            now_s = time.monotonic()
            mean_s, since_s = (self.changed_s - self.started_s) / max(self.done, 1), now_s - self.changed_s
            left_s = max(mean_s * (self.total - self.done) - since_s, since_s)
            times = [f"about {format_minutes(left_s)} {TIME_LEFT}"]
            if not self.done or self.done < MIN_SHARE_FOR_ETA * self.total:
                times = [f"{format_minutes(now_s - self.started_s)} min so far"]
        parts = [f"{truncate(self.title, TITLE_WIDTH)}: {self.done}/{self.total}", *times]
        return truncate(printable(", ".join([*parts, *(part for part in notes if part not in times)])), width)


class _LineColumn(ProgressColumn):
    """Column with the line of a step, cut to the width of the terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def render(self, task: Task) -> Text:
        width = self._console.width - BAR_WIDTH - 1
        return Text(task.fields["step"].line(width), no_wrap=True, overflow="ellipsis")


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

        def show(step: _ProgressStep) -> None:
            self._print("step", work=title, done=step.done, total=total, note=step.last_note)

        step = _ProgressStep(title, total, show)
        self._print("start", work=title, total=total)
        yield step
        self._print("end", work=title, done=step.done, total=total)

    def _print(self, event: str, **facts: object) -> None:
        time_s = round(time.monotonic() - self._start_s, 3)
        print(json.dumps({"time_s": time_s, "event": event, **facts}), file=sys.stderr, flush=True)
