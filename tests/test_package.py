"""The wheel: it holds what a run needs, and works outside of the checkout."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
QUIET = ["--quiet", "--disable-pip-version-check", "--no-deps"]


def test_the_wheel_has_every_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for top in ("harness", "search")
        for file in (ROOT / top).rglob("__init__.py")
    }
    mapped = {folder.replace("/", "."): name for name, folder in declared["package-dir"].items()}
    assert sorted(declared["packages"]) == sorted(mapped.get(folder, folder) for folder in folders)


@pytest.mark.slow
def test_a_wheel_installs_and_runs_outside_of_the_checkout(tmp_path):
    source, target = tmp_path / "source", tmp_path / "installed"
    for name in ("harness", "search"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip"]
    command = [*pip, "wheel", *QUIET, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("qdq_bench-*.whl")
    subprocess.run([*pip, "install", *QUIET, "--no-compile", "--target", str(target), str(wheel)], check=True)
    outside = {
        "cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(target)},
        "capture_output": True, "text": True, "check": True,
    }  # fmt: skip
    where = subprocess.run([sys.executable, "-c", "import harness, qdq; print(qdq.__file__)"], **outside)
    assert Path(where.stdout.strip()).is_relative_to(target)
    qdq = [sys.executable, "-m", "harness.cli.main"]
    subprocess.run([*qdq, "zoo", "shapes_detector", "-o", "model.onnx"], **outside)
    shown = subprocess.run([*qdq, "inspect", "regions", "model.onnx"], **outside)
    assert "region" in shown.stdout
    listed = subprocess.run([*qdq, "list"], **outside)
    assert "evolutionary" in listed.stdout
    tasks = subprocess.run([*qdq, "bench", "tasks"], **outside)
    assert "yolox_nano-onnxruntime" in tasks.stdout
