"""A machine with a simulated GPU, for tests of several runtimes."""

import os
import sys
from pathlib import Path

import pytest

from harness.workers import helper_process

FAKES = Path(__file__).parents[2] / "fakes"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A simulated GPU with TensorRT 11 and trtexec, also for programs that are started."""
    program = tmp_path / "bin" / "trtexec"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKES}/fake_trtexec.py" "$@"\n')
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_TRTEXEC", "11")
    monkeypatch.setenv("FAKE_TRTEXEC_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (FAKES / "gpu_machine", FAKES))))
    monkeypatch.syspath_prepend(str(FAKES / "gpu_machine"))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tensorrt", "cuda")]:
        monkeypatch.delitem(sys.modules, name)
    helper_process._process_helper(os.getpid())._stop()  # it may have imported an installed package of that name
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tensorrt", "cuda")]:
        del sys.modules[name]  # PyTorch asks each module of this name for its specification
