from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import harness.measure.machine_noise as machine_noise
from harness.measure.machine_noise import MachineMonitor, MachineSnapshot, describe_disturbance

STAT = """\
cpu  9000 100 150 90000 40 20 30 900 0 0
cpu0 300 50 50 4000 20 10 10 300 0 0
cpu1 400 50 100 5000 20 10 20 200 0 0
cpu2 8000 0 0 5000 0 0 0 0 0 0
cpu3 300 0 0 5000 0 0 0 400 0 0
intr 5
"""
SIBLINGS = "sys/devices/system/cpu/cpu1/topology/thread_siblings_list"


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_noise, "usable_cores", lambda: [0, 1])
    for core, khz in enumerate((800_000, 3_400_000)):
        write(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", f"{khz}\n")
        write(tmp_path, f"sys/devices/system/cpu/cpu{core}/thermal_throttle/core_throttle_count", f"{core}\n")
    write(tmp_path, "sys/class/thermal/thermal_zone0/temp", "41000\n")
    write(tmp_path, "sys/class/thermal/thermal_zone1/temp", "63500\n")
    write(tmp_path, "sys/fs/cgroup/cpu.stat", "usage_usec 12\nnr_periods 9\nnr_throttled 4\n")
    write(tmp_path, "proc/stat", STAT)
    write(tmp_path, "proc/self/task/1/schedstat", "100 2000000000 3\n")
    write(tmp_path, "proc/self/task/2/schedstat", "100 500000000 3\n")
    return tmp_path


def test_the_state_of_a_machine_is_read(root):
    found = MachineMonitor(root).read()
    assert (found.mhz, found.temperature_c, found.throttled, found.waited_s) == (3400.0, 63.5, 5, 2.5)
    assert (found.cores, found.busy_s, found.stolen_s) == (2, 10.0, 5.0)
    assert found.facts() == {"mhz": 3400.0, "temperature_c": 63.5, "load": pytest.approx(found.load, abs=0.01)}


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [("1,3\n", (2, 5.8 + 3.0, 2.0 + 4.0)), ("0-1\n", (2, 10.0, 5.0)), ("what\n", (1, 5.8, 2.0))],
)
def test_monitor_covers_allowed_cores_and_sibling_threads(siblings, expected, root, monkeypatch):
    monkeypatch.setattr(machine_noise, "usable_cores", lambda: [1])
    write(root, SIBLINGS, siblings)
    found = MachineMonitor(root).read()
    assert (found.cores, found.busy_s, found.stolen_s) == expected


def test_values_that_cannot_be_read_are_absent(tmp_path, root):
    found = MachineMonitor(tmp_path / "empty").read()
    assert (found.mhz, found.temperature_c, found.throttled, found.waited_s, found.cores) == (None,) * 5
    assert describe_disturbance(found, found) == ""
    machine = MachineMonitor(root)
    for path in root.rglob("schedstat"):
        path.write_text("what\n")
    (root / "sys/fs/cgroup/cpu.stat").unlink()
    found = machine.read()
    assert (found.waited_s, found.throttled) == (None, 1)


def test_monitor_reads_this_machine_and_own_cpu_time():
    machine = MachineMonitor()
    before = machine.read()
    burn = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    after = machine.read()
    assert after.at_s > before.at_s > 0
    assert after.own_s - before.own_s > 0.25, "the work of a program that this process started is its own"
    alive = [sys.executable, "-c", f"{burn}\nprint(); input()"]
    with subprocess.Popen(alive, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout
        program.stdout.readline()
        last, after = after, machine.read()
        assert after.own_s - last.own_s > 0.25, "also before it ends"
    if Path("/proc/stat").exists():
        assert 0 < before.cores <= psutil.cpu_count()
        assert after.busy_s >= before.busy_s > 0


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({}, ""),
        ({"throttled": 3}, ""),
        ({"throttled": 5}, "throttled 2 times, by heat or by the container's CPU quota"),
        ({"mhz": 2900.0}, ""),
        ({"mhz": 2000.0}, "the clock fell from 3000 to 2000 MHz"),
        ({"mhz": 4000.0}, ""),
        ({"waited_s": 1.05}, ""),
        ({"waited_s": 1.5}, "waited for a core 25% of the time"),
        ({"mhz": None, "throttled": None, "waited_s": None}, ""),
        ({"stolen_s": 0.1}, ""),
        ({"stolen_s": 0.2}, "the hypervisor took 5% of the cores' time"),
        ({"busy_s": 12.0, "own_s": 4.0}, ""),
        ({"busy_s": 12.0, "own_s": 2.2}, ""),
        ({"busy_s": 13.0, "own_s": 2.6}, "other processes kept 35% of its cores busy"),
    ],
)
def test_disturbances_are_described(after, expected):
    quiet = {"mhz": 3000.0, "throttled": 3, "waited_s": 1.0, "cores": 2, "busy_s": 10.0, "stolen_s": 0.0, "own_s": 1.0}
    before, later = MachineSnapshot(at_s=10.0, **quiet), MachineSnapshot(at_s=12.0, **{**quiet, **after})
    found = describe_disturbance(before, later)
    assert found.partition(": ")[0] == expected
    assert (": another program runs on this machine" in found) is expected.startswith(("waited", "other"))
