"""Environment of a measurement: every fact is optional, and none names a folder of this machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

import harness.measure.provenance as provenance
from harness.measure.provenance import comparability_key, count_cores, describe_environment, validate_threads


def test_environment_is_json_without_folders_of_this_machine():
    facts = describe_environment()
    text = json.dumps(facts)
    assert json.loads(text) == facts
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["cpu"]["model"] == provenance.cpu_model_name()
    assert facts["python"].startswith("3.")
    assert str(Path.home()) not in text
    assert str(Path(__file__).parents[3]) not in text


@pytest.mark.parametrize(
    ("flags", "label"),
    [
        (["avx2"], "AMD EPYC (AVX2)"),
        (["avx2", "avx512f", "avx512_vnni", "avx512_bf16"], "AMD EPYC (AVX512-VNNI)"),
        (["avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8"], "AMD EPYC (AMX)"),
        ([], "AMD EPYC"),
    ],
)
def test_processor_label_includes_int8_instructions(flags, label):
    facts = {"cpu": {"model": "AMD EPYC", "flags": flags}}
    assert provenance.processor_label("AMD EPYC", facts) == label
    assert comparability_key(facts) != comparability_key({"cpu": {"model": "AMD EPYC", "flags": ["sve"]}})
    assert provenance.machine_processor_label().startswith(provenance.cpu_model_name())


def raising(error: Exception) -> object:
    def refuse(*_: object, **__: object) -> None:
        raise error

    return refuse


@pytest.mark.parametrize("error", [OSError("not here"), subprocess.TimeoutExpired("tool", 10)])
def test_facts_that_cannot_be_read_are_absent(error, monkeypatch):
    for name in ("_read_text", "_run_command", "_cpuinfo"):
        monkeypatch.setattr(provenance, name, raising(error))
    facts = describe_environment()
    assert "git_commit" not in facts
    assert facts["cpu"]["model"]


ROWS = "\n".join(f"{name}, 570.1, 9.0, 81559 MiB, 1980 MHz, 1980 MHz, 31, 70.1 W" for name in "AB")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["A", "B"]), ("1", ["B"]), ("0,1", ["A", "B"]), ("", []), ("7", []), ("GPU-1234", ["A", "B"])],
)
def test_the_gpus_of_this_process_are_read_from_nvidia_smi(monkeypatch, visible, expected):
    monkeypatch.setattr(provenance.shutil, "which", lambda _: "/usr/bin/tool")
    monkeypatch.setattr(provenance, "_run_command", lambda *command: ROWS if command[0] == "nvidia-smi" else "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = describe_environment().get("gpus", [])
    assert [gpu["name"] for gpu in gpus] == expected
    assert all(gpu["clocks.max.sm"] == "1980 MHz" for gpu in gpus)


def test_the_number_of_gpus_of_a_kind_does_not_matter():
    one, other = ({"name": name, "driver_version": "570.1", "temperature.gpu": "31"} for name in "AB")
    kinds = [comparability_key({"gpus": gpus}) for gpus in ([one, one], [one], [one, other], [other, one])]
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3]


@pytest.mark.parametrize("threads", [0, -1, 10_000, 1.0, "1", True, None])
def test_impossible_numbers_of_threads_are_refused(threads):
    assert validate_threads(count_cores()) == count_cores()
    with pytest.raises(ValueError, match=rf"threads: 1 to {count_cores()} .* but got {threads!r}"):
        validate_threads(threads)


UNLIMITED_BYTES = "9223372036854771712"


@pytest.mark.parametrize(
    ("files", "cores", "memory_gib"),
    [
        ({"cgroup.controllers": "cpu memory", "cpu.max": "150000 100000", "memory.max": str(2**30)}, 1.5, 1.0),
        ({"cgroup.controllers": "cpu memory", "cpu.max": "max 100000", "memory.max": "max"}, None, None),
        (
            {"cpu/own/cpu.cfs_quota_us": "200000", "cpu/own/cpu.cfs_period_us": "100000",
             "memory/memory.limit_in_bytes": str(2**29)}, 2.0, 0.5,
        ),
        (
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
             "memory/memory.limit_in_bytes": UNLIMITED_BYTES}, None, None,
        ),
        ({}, None, None),
    ],
)  # fmt: skip
def test_limits_of_a_container_are_read(files, cores, memory_gib, monkeypatch, tmp_path):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = tmp_path / "own"
    own.write_text("0::/\n" if "cgroup.controllers" in files else "2:cpuacct,cpu:/own\n1:memory:/elsewhere\n0::/\n")
    original = provenance.Path

    def moved(path: str | Path) -> Path:
        text = str(path)
        return original(text.replace("/sys/fs/cgroup", str(tmp_path), 1).replace("/proc/self/cgroup", str(own)))

    monkeypatch.setattr(provenance, "Path", moved)
    limits = describe_environment()["limits"]
    assert (limits.get("cgroup_cores"), limits.get("cgroup_memory_gib")) == (cores, memory_gib)
