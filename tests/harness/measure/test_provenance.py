from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from harness.measure import provenance


def test_environment_is_json_and_names_what_matters() -> None:
    facts = provenance.environment()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["packages"]["numpy"]
    assert facts["cpu"]["model"] == provenance.cpu_model()
    assert facts["python"].startswith("3.")


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
