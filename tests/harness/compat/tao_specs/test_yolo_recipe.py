"""The YOLO recipe: from a user's two paths to one table of mAP and latency."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.config.experiment import parse_experiment, to_yaml
from harness.run.prepare.preflight import check_experiment

ROOT = Path(__file__).resolve().parents[4]
RECIPE = ROOT / "experiments/yolo11_recipe.yaml"


def command_line() -> str:
    """The command that changes the two paths, as in the recipe's own text."""
    line = next(line for line in RECIPE.read_text(encoding="utf-8").splitlines() if "sed -e" in line)
    return line.removeprefix("#").strip()


def recipe(detector: Path, coco: Path) -> str:
    """The committed file after that command."""
    ours = command_line().replace("/models/yolo11n.onnx", str(detector)).replace("/data/coco/", f"{coco}/")
    command = shlex.split(ours.partition(" experiments/")[0])
    return subprocess.run([*command, str(RECIPE)], check=True, capture_output=True, text=True).stdout


def test_recipe_needs_only_two_paths(detector, coco, tmp_path):
    config = parse_experiment(recipe(detector, coco).replace("count: 500", "count: 8"), "recipe", tmp_path)
    check_experiment(config)
    assert config.precision == ("int8", "fp8")
    assert {"linear", "all", "extreme", "modelopt_ptq", "ort_static"} == set(config.baselines)
    assert command_line() in (ROOT / "docs/how-to/yolo.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_recipe_produces_a_table_of_map_and_latency(detector, coco, tmp_path):
    """Cut to what a test has time for: no PTQ tools, one float precision, one evaluation beyond the seed."""
    config = parse_experiment(recipe(detector, coco).replace("count: 500", "count: 8"), "recipe", tmp_path)
    changes = {
        "backends": [{"use": "onnxruntime", "params": {"threads": 1}}],
        "precision": ["int8"],
        "initial": ["float"],
        "baselines": ["linear"],
        "searchers": ["random"],
        "budget": {"evaluations": [2]},
        "sampling": {"warmup_ms": 5.0, "min_samples": 3, "max_ms": 50.0},
        "confirmation": {"builds": 3, "rounds": 2, "samples": 3, "candidates": 1},
    }
    short = type(config).model_validate({**config.model_dump(), **changes})
    (tmp_path / "recipe.yaml").write_text(to_yaml(short), encoding="utf-8")
    done = CliRunner().invoke(app, ["run", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    table = (tmp_path / "out/report/main.md").read_text(encoding="utf-8")
    assert re.search(r"\| random +\|", table), table
    for method in ("float", "linear"):
        assert re.search(rf"\| {method} +\|.*\| mAP 0\.\d+ ", table), table
