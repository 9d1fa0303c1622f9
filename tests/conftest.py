"""Tests of plug-ins name their own modules, which are trusted here; tests of the trust itself take it away."""

import functools
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import typer.main
from hypothesis import HealthCheck, settings

from harness.plugins.registry import without_module
from harness.workers.helper_process import _process_helper

with without_module("torch"):  # `onnxruntime.tools` imports PyTorch where it is installed, which takes seconds
    import onnxruntime.quantization  # noqa: F401

typer.main.get_command = functools.cache(typer.main.get_command)  # each call of `app` would make all commands again

# Its limits are of wall-clock, which other programs on the machine exceed.
settings.register_profile("qdq", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("qdq")
gc.set_threshold(50_000, 20, 20)  # as `qdq` does
os.environ["QDQ_TRUST_PLUGINS"] = "1"

# On a disk, each fsync and each removed folder takes milliseconds.
MEMORY, NEEDED_BYTES = Path("/dev/shm"), 8 << 30
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= NEEDED_BYTES:
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

LONG_FILES = (
    "test_contracts.py",
    "test_docs.py",
    "test_searchers.py",
    "test_notebooks.py",
    "test_package.py",
)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory):
    """Give each process of the suite a timing lock of its own, which lies in the folder for temporary files."""
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())  # its sockets lie there: at most 107 bytes a path
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session", autouse=True)
def helper_end():
    """Let the helper process end by itself under coverage, which writes no data of a process that is killed."""
    yield
    worker = _process_helper(os.getpid())._worker if "coverage" in sys.modules else None
    if worker is not None:
        worker._connection.close()
        worker.describe_exit()  # waits


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with long files of the end, so that no process of the suite waits for another one."""
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
