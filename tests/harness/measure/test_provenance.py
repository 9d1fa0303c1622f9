from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from harness.measure import provenance


def test_environment_is_json_and_names_what_matters() -> None:
    facts = provenance.environment()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["cpu"]["model"] == provenance.cpu_model()
    assert facts["python"].startswith("3.")


@pytest.mark.parametrize(
    ("flags", "device"),
    [
        (["avx2"], "AMD EPYC (AVX2)"),
        (["avx2", "avx512f", "avx512_vnni", "avx512_bf16"], "AMD EPYC (AVX512-VNNI)"),
        (["avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8"], "AMD EPYC (AMX)"),
        ([], "AMD EPYC"),
    ],
)
def test_processors_of_one_name_are_told_apart_by_what_multiplies_int8(flags: list[str], device: str) -> None:
    facts = {"cpu": {"model": "AMD EPYC", "flags": flags}}
    assert provenance.with_instructions("AMD EPYC", facts) == device
    assert provenance.decisive(facts) != provenance.decisive({"cpu": {"model": "AMD EPYC", "flags": ["sve"]}})
    assert provenance.processor().startswith(provenance.cpu_model())


def test_environment_names_no_folder_of_this_machine() -> None:
    text = json.dumps(provenance.environment())
    assert str(Path.home()) not in text
    assert str(Path(__file__).parents[3]) not in text


def test_every_probe_fails_softly(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr(provenance, "_read", refuse)
    monkeypatch.setattr(provenance, "_run", refuse)
    monkeypatch.setattr(provenance, "_cpuinfo", refuse)
    facts = provenance.environment()
    assert "git_commit" not in facts
    assert facts["cpu"]["model"]


def test_gpus_are_read_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    row = "NVIDIA H100, 570.1, 9.0, 81559 MiB, 1980 MHz, 1980 MHz, 31, 70.1 W"
    monkeypatch.setattr(provenance.shutil, "which", lambda _: "/usr/bin/tool")
    monkeypatch.setattr(provenance, "_run", lambda *command: row if command[0] == "nvidia-smi" else "")
    (gpu,) = provenance.environment()["gpus"]
    assert gpu["name"] == "NVIDIA H100"
    assert gpu["clocks.max.sm"] == "1980 MHz"


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, ["A", "B"]), ("1", ["B"]), ("0,1", ["A", "B"]), ("", []), ("7", []), ("GPU-1234", ["A", "B"])],
)
def test_a_process_is_known_by_the_gpus_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: list[str]
) -> None:
    rows = "\n".join(f"{name}, 570.1, 9.0, 81559 MiB, 1980 MHz, 1980 MHz, 31, 70.1 W" for name in "AB")
    monkeypatch.setattr(provenance.shutil, "which", lambda _: "/usr/bin/tool")
    monkeypatch.setattr(provenance, "_run", lambda *command: rows if command[0] == "nvidia-smi" else "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert [gpu["name"] for gpu in provenance.environment().get("gpus", [])] == expected


def test_how_many_gpus_of_a_kind_there_are_is_no_matter() -> None:
    one, other = ({"name": name, "driver_version": "570.1", "temperature.gpu": "31"} for name in "AB")
    kinds = [provenance.decisive({"gpus": gpus}) for gpus in ([one, one], [one], [one, other], [other, one])]
    assert kinds[0] == kinds[1]
    assert kinds[1] != kinds[2]
    assert kinds[2] == kinds[3]


def test_a_tool_that_hangs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*command: str) -> str:
        raise subprocess.TimeoutExpired(command, 10)

    monkeypatch.setattr(provenance, "_run", hang)
    assert "git_commit" not in provenance.environment()


@pytest.mark.parametrize("threads", [0, -1, 10_000, 1.0, "1", True, None])
def test_threads_that_cannot_be_are_refused(threads: object) -> None:
    message = rf"threads: 1 to {provenance.cores()} \(the cores that this process may use\), but got {threads!r}"
    with pytest.raises(ValueError, match=message):
        provenance.checked_threads(threads)


def test_threads_up_to_the_cores_are_taken() -> None:
    assert provenance.checked_threads(provenance.cores()) == provenance.cores()


@pytest.mark.parametrize(
    ("files", "cores", "memory_gib"),
    [
        ({"cgroup.controllers": "cpu memory", "cpu.max": "150000 100000", "memory.max": str(2**30)}, 1.5, 1.0),
        ({"cgroup.controllers": "cpu memory", "cpu.max": "max 100000", "memory.max": "max"}, None, None),
        (
            {
                "cpu/own/cpu.cfs_quota_us": "200000",
                "cpu/own/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": str(2**29),
            },
            2.0,
            0.5,
        ),
        (
            {
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "9223372036854771712",
            },
            None,
            None,
        ),
        ({}, None, None),
    ],
)
def test_limits_of_a_container_are_read(
    files: dict[str, str],
    cores: float | None,
    memory_gib: float | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = tmp_path / "own"
    own.write_text("0::/\n" if "cgroup.controllers" in files else "2:cpuacct,cpu:/own\n1:memory:/elsewhere\n0::/\n")
    there = provenance.Path

    def moved(path: str | Path) -> Path:
        text = str(path)
        return there(text.replace("/sys/fs/cgroup", str(tmp_path), 1).replace("/proc/self/cgroup", str(own)))

    monkeypatch.setattr(provenance, "Path", moved)
    limits = provenance.environment()["limits"]
    assert limits.get("cgroup_cores") == cores
    assert limits.get("cgroup_memory_gib") == memory_gib
