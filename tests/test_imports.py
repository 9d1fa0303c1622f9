"""Every module can be imported, and the demo runs in simulation, on this version of Python."""

import importlib
import pkgutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from small import qdq

import harness
import search
from harness.results.folder import load

DEMO = Path(__file__).parents[1] / "experiments" / "demo.yaml"
MODULES = [
    found.name
    for package in (harness, search)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not found.name.startswith("harness.accuracy.tools.programs.")  # they run in the environments of other tools
]


def test_every_module_can_be_imported():
    assert len(MODULES) > 100
    for name in MODULES:
        if "ray_" not in name or find_spec("ray"):
            importlib.import_module(name)


@pytest.mark.slow
def test_demo_runs_in_simulation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    demo = yaml.safe_load(DEMO.read_text())
    demo["backends"] = ["simulated"]
    del demo["objective"], demo["models"][0]["evaluator"]  # the simulated runtime has latencies alone
    demo["models"][0]["calibration"]["samples"] = 4
    demo["initial"] = ["float", "linear", "all"]
    demo["budget"] = {"evaluations": [8]}
    demo["baselines"] = ["linear"]
    Path("demo.yaml").write_text(yaml.safe_dump(demo))
    assert qdq("run", "demo.yaml", "--out", "out") == 0
    (task,) = load(Path("out")).tasks
    assert [each.evaluations for each in task.searches] == [8, 8]
    assert task.complete
