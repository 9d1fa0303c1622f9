"""Disturbances of a timing: clock, temperature, load and other processes. Values that cannot be read are None."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
THROTTLED_CLOCK_RATIO = 0.9  # a clock above this share of the earlier one is normal operation of the governor
MAX_WAIT_SHARE = 0.1  # largest share of the time without a core; the median is robust against less
MAX_STEAL_SHARE = 0.03  # largest share of the cores' time for other guests; an idle hypervisor takes less than 1 %
MAX_OTHER_LOAD_SHARE = 0.25  # largest share of the time of our cores and their sibling threads for other processes
CPU_TIME_RESOLUTION_S = 0.02  # smaller CPU times are below Linux' resolution (two ticks of 10 ms)
MAX_CLOCKS_READ = 4  # number of cores whose clock is read, because machines may have hundreds


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSnapshot:
    """State of the machine at one moment; None for values that cannot be read.

    The watched cores are those that this process may use, and their sibling threads. A process with cores of its own
    (taskset, a container's cpuset) is therefore not disturbed by work on others. Effects on shared caches and memory
    are not seen; they were within noise on the machines that were measured (docs/explanation/measurement.md).

    Attributes:
        at_s: Time on a monotonic clock.
        mhz: Clock of the fastest core that this process may use.
        temperature_c: Highest temperature of all sensors.
        load: Load average of one minute.
        throttled: Number of times since start that heat or the container's CPU quota slowed this machine.
        waited_s: Time that threads of this process were ready to run and had no core.
        cores: Number of watched cores.
        busy_s: Time that the watched cores worked for processes of this machine.
        stolen_s: Time that the watched cores were ready and a hypervisor gave to other guests.
        own_s: CPU time of this process and of its descendants, such as trtexec or Node.js.
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
        """Return clock, temperature and load by name for the record, as far as they are known."""
        values = {"mhz": self.mhz, "temperature_c": self.temperature_c, "load": self.load}
        return {name: round(value, 2) for name, value in values.items() if value is not None}


class MachineMonitor:
    """Reader of machine snapshots. It finds the kernel's files below `root` once, which takes longer than reading."""

    def __init__(self, root: Path = Path("/")) -> None:
        folders = {core: root / f"sys/devices/system/cpu/cpu{core}" for core in usable_cores()}
        watched = set(folders)
        for folder in folders.values():  # Linux' list of the threads of a core: "0,64" or "0-1"
            text = _or_none((folder / "topology/thread_siblings_list").read_text) or ""
            bounds = [part.split("-") for part in text.strip().split(",") if part]
            with suppress(ValueError):
                watched.update(cpu for bound in bounds for cpu in range(int(bound[0]), int(bound[-1]) + 1))
        self._watched = {f"cpu{core}" for core in watched}
        cores = list(folders.values())[:MAX_CLOCKS_READ]
        self._clocks = _readable_paths(core / "cpufreq/scaling_cur_freq" for core in cores)
        self._sensors = _readable_paths(sorted((root / "sys/class/thermal").glob("thermal_zone*/temp")))
        names = ("core_throttle_count", "package_throttle_count")
        self._throttles = _readable_paths(core / "thermal_throttle" / name for core in cores for name in names)
        # The container's own control group, if Docker or Kubernetes shows it here: version 2, version 1.
        self._quotas = _readable_paths(root / "sys/fs/cgroup" / name for name in ("cpu.stat", "cpu/cpu.stat"))
        self._tasks = root / "proc/self/task"
        self._stat = root / "proc/stat"

    def read(self) -> MachineSnapshot:
        """Return the current state; takes a tenth of a millisecond."""
        cores, busy_s, stolen_s = _or_none(self._core_times) or (None, None, None)
        throttled = [int(_read_number(path)) for path in self._throttles]
        for path in self._quotas:  # periods in which a control group exhausted its quota, if it has one
            with suppress(OSError, ValueError):
                fields = dict(line.split()[:2] for line in path.read_text().splitlines())
                throttled.append(int(fields.get("nr_throttled", 0)))
        waited_s = None
        with suppress(OSError, ValueError, IndexError):  # time on run queues: Linux' schedstat, in nanoseconds
            texts = [(task / "schedstat").read_text() for task in self._tasks.iterdir()]
            waited_s = sum(int(text.split()[1]) for text in texts) / 1e9
        own_s = time.process_time() + sum(os.times()[2:4])
        for pid in list(process_tree(os.getpid()))[1:]:  # proc(5), /proc/PID/stat: also of children that have ended
            text = _or_none(Path(f"/proc/{pid}/stat").read_text) or ""
            own_s += sum(map(int, text.rpartition(")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")
        return MachineSnapshot(
            at_s=time.monotonic(),
            mhz=max((_read_number(path) / 1000 for path in self._clocks), default=None),
            temperature_c=max((_read_number(path) / 1000 for path in self._sensors), default=None),
            load=_or_none(lambda: os.getloadavg()[0]),
            throttled=sum(throttled) if throttled else None,
            waited_s=waited_s,
            cores=cores,
            busy_s=busy_s,
            stolen_s=stolen_s,
            own_s=own_s,
        )

    def _core_times(self) -> tuple[int, float, float]:
        """Return number, working time and stolen time of the watched cores (proc(5), /proc/stat, in clock ticks).

        psutil gives the same times but not the cores' numbers, which differ from its order if a core is offline. Time
        of guests that run here is part of user and nice.
        """
        lines = [line.split() for line in self._stat.read_text().splitlines()]
        ticks = [[int(field) for field in line[1:9]] for line in lines if line and line[0] in self._watched]
        busy = sum(user + nice + system + irq + softirq for user, nice, system, _, _, irq, softirq, _ in ticks)
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        return len(ticks), busy / ticks_per_s, sum(core[7] for core in ticks) / ticks_per_s


def describe_disturbance(before: MachineSnapshot, after: MachineSnapshot) -> str:
    """Describe why readings between two snapshots are not reliable; "" if no disturbance was seen."""
    spent_s = after.at_s - before.at_s
    if before.throttled is not None and after.throttled is not None and after.throttled > before.throttled:
        return f"throttled {after.throttled - before.throttled} times, by heat or by the container's CPU quota"
    if before.mhz and after.mhz and after.mhz < THROTTLED_CLOCK_RATIO * before.mhz:
        return f"the clock fell from {before.mhz:.0f} to {after.mhz:.0f} MHz"
    if before.waited_s is not None and after.waited_s is not None and spent_s > 0:
        share = (after.waited_s - before.waited_s) / spent_s
        if share > MAX_WAIT_SHARE:
            return f"waited for a core {share:.0%} of the time: another program runs on this machine"
    if not after.cores or spent_s <= 0:
        return ""
    total_s = spent_s * after.cores
    stolen_s, busy_s, own_s = (getattr(after, name) - getattr(before, name) for name in ("stolen_s", "busy_s", "own_s"))
    if stolen_s > MAX_STEAL_SHARE * total_s + CPU_TIME_RESOLUTION_S:
        return f"the hypervisor took {stolen_s / total_s:.0%} of the cores' time: other guests run on this host"
    others_s = busy_s - own_s
    if others_s > MAX_OTHER_LOAD_SHARE * total_s + CPU_TIME_RESOLUTION_S:
        return f"other processes kept {others_s / total_s:.0%} of its cores busy: another program runs on this machine"
    return ""


def usable_cores() -> list[int]:
    """Return the numbers of the CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def process_tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants that are still running.

    The kernel's list of the children of each thread is used, because psutil searches all processes of the machine. That
    takes 1 to 10 ms of a core on which a worker may be timing.
    """
    pending = [pid]
    while pending:
        yield (parent := pending.pop())
        with suppress(OSError):  # the process or one of its threads ended meanwhile
            for thread in os.listdir(f"/proc/{parent}/task"):
                with suppress(OSError):
                    pending += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())


def _readable_paths(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(path for path in paths if _or_none(path.read_bytes) is not None)


def _read_number(path: Path) -> float:
    return _or_none(lambda: float(path.read_text())) or 0.0


def _or_none(probe: Callable[[], T]) -> T | None:
    try:
        return probe()
    except (OSError, ValueError, IndexError, AttributeError):  # the last: Windows has no sysconf
        return None
