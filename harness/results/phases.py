"""Wall-clock of a task by phase: `phases.json` in its folder."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from harness.base.files import read_json
from harness.results.manifest import write_record

PHASES_FILE = "phases.json"
SEARCH_SHARE = 0.5
"""Share of a task's time limit at which searches end, with noise floor, calibration and the float model's score."""


class PhaseClock:
    """Clock of the phases of a task, summed over interruptions; the time of an interrupted phase is not counted.

    Args:
        phase: First phase.
    """

    def __init__(self, folder: Path, phase: str) -> None:
        self._path, self._phase = folder / PHASES_FILE, phase
        self._seconds = dict(read_phases(folder))
        self._since_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Return the seconds of all phases so far, interrupted ones included where they were written."""
        return sum(self._seconds.values()) + time.monotonic() - self._since_s

    def seconds_of(self, phase: str) -> float:
        """Return the seconds of an ended phase; 0 for others."""
        return self._seconds.get(phase, 0.0)

    def start(self, phase: str) -> None:
        """End the current phase and start another one; `write` writes the file."""
        now_s = time.monotonic()
        self._seconds[self._phase] = round(self._seconds.get(self._phase, 0.0) + now_s - self._since_s, 3)
        self._phase, self._since_s = phase, now_s

    def split(self, phase: str, into: str, share: float) -> None:
        """Move a share of the time of an earlier phase to the phase `into`."""
        moved_s = share * self.seconds_of(phase)
        self._seconds[phase] = round(self.seconds_of(phase) - moved_s, 3)
        self._seconds[into] = round(self.seconds_of(into) + moved_s, 3)

    def write(self, phase: str) -> None:
        """End the current phase, write the file and start another phase."""
        self.start(phase)
        write_record(self._path, self._seconds)


def read_phases(folder: Path) -> Mapping[str, float]:
    """Return the seconds of each phase in their order; empty without a valid record."""
    phases = read_json(folder / PHASES_FILE, {})
    valid = all(isinstance(value, int | float) and 0 <= value < math.inf for value in phases.values())
    return phases if valid else {}
