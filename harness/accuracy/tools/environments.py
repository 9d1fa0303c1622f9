"""Virtual environments of tools whose pinned dependencies contradict those of the project."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

from harness.errors import UserError, suggest_names
from harness.paths import cache_dir
from harness.results_dir.io import explain_write_errors

#: By name of the environment: the pinned packages that `pip` installs.
REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "quark": ("amd-quark==0.13", "torch==2.13.0", "onnxruntime==1.24.4", "onnx==1.21.0", "numpy==2.4.6"),
}
_COMPLETE_MARK = "complete.json"
"""Written last, so that an installation that was interrupted counts as missing."""


def environment_python(name: str) -> Path | None:
    """Return the interpreter of an installed environment, or None."""
    folder = _environment_folder(name)
    return folder / "bin" / "python" if (folder / _COMPLETE_MARK).exists() else None


def install_environment(name: str, index_url: str | None = None) -> Path:
    """Create an environment, install its pinned packages with pip, and return its interpreter.

    Args:
        index_url: Additional package index, such as that of PyTorch's builds without CUDA.

    Raises:
        UserError: There is no such environment, or pip fails.
    """
    if name not in REQUIREMENTS:
        raise UserError(f"no tool is called {name!r}; {suggest_names(name, REQUIREMENTS)}")
    if (known := environment_python(name)) is not None:
        return known
    folder = _environment_folder(name)
    with explain_write_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        index = [] if index_url is None else ["--extra-index-url", index_url]
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", *index, *REQUIREMENTS[name]], check=False)
        if done.returncode:
            raise UserError(f"{name}: pip ended with status {done.returncode}; its reason is above")
        facts = {"requirements": REQUIREMENTS[name], "python": sys.version.split()[0]}
        (folder / _COMPLETE_MARK).write_text(json.dumps(facts), encoding="utf-8")
    return python


def _environment_folder(name: str) -> Path:
    """Return the folder of an environment, whose name changes with its pins."""
    pins = hashlib.sha256(repr(REQUIREMENTS[name]).encode()).hexdigest()[:12]
    return cache_dir() / "tools" / f"{name}-{pins}"
