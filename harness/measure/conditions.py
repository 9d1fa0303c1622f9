"""What the machine did while an engine was timed: clock, heat, load, neighbours. What cannot be read is absent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

__all__ = ["Conditions", "Machine", "disturbance"]

T = TypeVar("T")
CLOCK_FALLS = 0.9
"""A clock below this share of what it was has been throttled; less is the governor's ordinary play."""
WAITING = 0.1
"""Waiting for a core for more than this share of the time is a disturbance; the median bears less."""
STOLEN = 0.03
"""A hypervisor that gives more than this share of the cores' time to other guests disturbs; an idle one, under 1 %."""
OTHERS = 0.25
"""Other processes that keep more than this share of our cores and their sibling threads busy take time from ours."""
GRAIN_S = 0.02
"""Linux counts the time of cores in steps of 10 ms; two of them say nothing."""
CORES = 4
"""Cores whose clocks are read: enough to see the one that works, few enough for machines that have hundreds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """One look at the machine; None where it does not tell.

    Attributes:
        at_s: When, on a monotonic clock.
        mhz: Clock of the fastest core that this process may use.
        temperature_c: Of the hottest sensor.
        load: Processes that ran or wanted to, average of a minute.
        throttled: Times that heat, or the container's CPU quota, slowed this machine since it started.
        waited_s: Time that threads of this process were ready to run and had no core.
        cores: How many cores the next two are of: those that this process may use, and their sibling threads. A process
            that was given cores of its own (taskset, a container's cpuset) is not called disturbed by the others. What
            they do to shared caches and memory is not seen here; where we measured it, it was within noise
            (docs/measurement.md).
        busy_s: Time that these cores worked for processes of this machine.
        stolen_s: Time that these cores wanted to work and a hypervisor did not let them.
        own_s: Time that cores worked for this process and for those that it started and that have ended, as trtexec.
    """

    at_s: float
    mhz: float | None = None
    temperature_c: float | None = None
    load: float | None = None
    throttled: int | None = None
    waited_s: float | None = None
    cores: int | None = None
    busy_s: float | None = None
    stolen_s: float | None = None
    own_s: float | None = None

    def facts(self) -> dict[str, float]:
        """What is worth recording beside the readings."""
        shown = {"mhz": self.mhz, "temperature_c": self.temperature_c, "load": self.load}
        return {name: round(value, 2) for name, value in shown.items() if value is not None}


class Machine:
    """Where this machine tells its conditions; found once, because looking takes longer than reading.

    Args:
        root: Of the file system.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        own = _own_cores()
        folders = {core: root / f"sys/devices/system/cpu/cpu{core}" for core in own}
        self._watched = {f"cpu{core}" for folder in folders.values() for core in _siblings(folder)}
        self._watched |= {f"cpu{core}" for core in own}
        cores = list(folders.values())[:CORES]
        self._clocks = _readable(core / "cpufreq/scaling_cur_freq" for core in cores)
        self._sensors = _readable(sorted((root / "sys/class/thermal").glob("thermal_zone*/temp")))
        names = ("core_throttle_count", "package_throttle_count")
        self._throttles = _readable(core / "thermal_throttle" / name for core in cores for name in names)
        # Of this container where it has a view of its own, as Docker and Kubernetes give it: version 2, version 1.
        self._quotas = _readable(root / "sys/fs/cgroup" / name for name in ("cpu.stat", "cpu/cpu.stat"))
        self._tasks = root / "proc/self/task"
        self._stat = root / "proc/stat"

    def read(self) -> Conditions:
        """The conditions now; a tenth of a millisecond."""
        cores, busy_s, stolen_s = _soft(self._cores) or (None, None, None)
        return Conditions(
            at_s=time.monotonic(),
            mhz=max((_number(path) / 1000 for path in self._clocks), default=None),
            temperature_c=max((_number(path) / 1000 for path in self._sensors), default=None),
            load=_soft(lambda: os.getloadavg()[0]),
            throttled=self._throttled(),
            waited_s=_soft(self._waited_s),
            cores=cores,
            busy_s=busy_s,
            stolen_s=stolen_s,
            own_s=time.process_time() + sum(os.times()[2:4]),
        )

    def _throttled(self) -> int | None:
        counts = [int(_number(path)) for path in self._throttles]
        counts += [count for path in self._quotas if (count := _soft(lambda path=path: _periods(path))) is not None]  # type: ignore[misc]
        return sum(counts) if counts else None

    def _waited_s(self) -> float:
        """Second field of Linux' schedstat: nanoseconds on a run queue."""
        texts = [(task / "schedstat").read_text() for task in self._tasks.iterdir()]
        return sum(int(text.split()[1]) for text in texts) / 1e9

    def _cores(self) -> tuple[int, float, float]:
        """How many are watched, time they worked, time stolen from them; proc(5), /proc/stat, in clock ticks.

        Guests that run here are in user and nice already.
        """
        lines = [line.split() for line in self._stat.read_text().splitlines()]
        ticks = [[int(field) for field in line[1:9]] for line in lines if line and line[0] in self._watched]
        busy = sum(user + nice + system + irq + softirq for user, nice, system, _, _, irq, softirq, _ in ticks)
        ticks_s = os.sysconf("SC_CLK_TCK")
        return len(ticks), busy / ticks_s, sum(core[7] for core in ticks) / ticks_s


def disturbance(before: Conditions, after: Conditions) -> str:
    """Why readings that were taken between two looks are not to be trusted; "" where nothing speaks against them."""
    spent_s = after.at_s - before.at_s
    if before.throttled is not None and after.throttled is not None and after.throttled > before.throttled:
        return f"throttled {after.throttled - before.throttled} times, by heat or by the container's CPU quota"
    if before.mhz and after.mhz and after.mhz < CLOCK_FALLS * before.mhz:
        return f"the clock fell from {before.mhz:.0f} to {after.mhz:.0f} MHz"
    if before.waited_s is not None and after.waited_s is not None and spent_s > 0:
        share = (after.waited_s - before.waited_s) / spent_s
        if share > WAITING:
            return f"waited for a core {share:.0%} of the time: something else runs on this machine"
    return _neighbours(before, after, spent_s)


def _neighbours(before: Conditions, after: Conditions, spent_s: float) -> str:
    """Who else worked on this machine, or on the host below it."""
    if not after.cores or spent_s <= 0:
        return ""
    total_s = spent_s * after.cores
    stolen_s, busy_s, own_s = (getattr(after, name) - getattr(before, name) for name in ("stolen_s", "busy_s", "own_s"))
    if stolen_s > STOLEN * total_s + GRAIN_S:
        return f"the hypervisor took {stolen_s / total_s:.0%} of the cores' time: other guests run on this host"
    others_s = busy_s - own_s
    if others_s > OTHERS * total_s + GRAIN_S:
        return f"other processes kept {others_s / total_s:.0%} of its cores busy: something else runs on this machine"
    return ""


def _own_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _siblings(core: Path) -> list[int]:
    """Threads of the same core, as Linux lists them: "0,64" or "0-1"; none where it does not."""
    text = _soft((core / "topology/thread_siblings_list").read_text) or ""
    bounds = [part.split("-") for part in text.strip().split(",") if part]
    return _soft(lambda: [core for bound in bounds for core in range(int(bound[0]), int(bound[-1]) + 1)]) or []


def _readable(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(path for path in paths if _soft(path.read_bytes) is not None)


def _number(path: Path) -> float:
    return _soft(lambda: float(path.read_text())) or 0.0


def _periods(path: Path) -> int:
    """How often a control group had used up its quota; 0 where it has none."""
    fields: Mapping[str, str] = dict(line.split()[:2] for line in path.read_text().splitlines())
    return int(fields.get("nr_throttled", 0))


def _soft(probe: Callable[[], T]) -> T | None:
    try:
        return probe()
    except (OSError, ValueError, IndexError, AttributeError):  # the last: no sysconf on Windows
        return None
