"""Measure what other tools keep of a placement's gain if they quantize by its recipe.

    python experiments/scripts/host_share.py MODEL OUT [--evaluations 16]

Searches a placement (OpenVINO, one thread, ranges of random data), writes its recipe for each tool, runs the recipes,
and times the files in turns on fresh builds. The share is that of the saved time, 1 - 1 / speedup. Takes about five
minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from harness.base.random_inputs import random_feeds
from harness.config.yaml_loader import dump_yaml
from harness.graph.load import load
from harness.report.frames import main_frame
from harness.results.folder import load as load_results

TOOLS = ("nncf", "ort", "modelopt")
SAMPLES = 8
SCHEDULE = {"builds": 5, "rounds": 12, "samples": 3}


def run_qdq(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "harness.cli.main", *arguments], check=True)


def run_experiment(folder: Path, name: str, **keys: Any) -> Path:
    """Run an experiment on OpenVINO with one thread, and return its results folder."""
    described = {"experiment": name, "backends": [{"use": "openvino", "params": {"threads": 1}}],
                 "confirmation": SCHEDULE, **keys}  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(dump_yaml(described))
    run_qdq("run", str(file), "--out", str(folder / name))
    return folder / name


def write_calibration(model: Path, file: Path) -> None:
    """Write random samples of the model's inputs, as the recipes expect them."""
    types = load(model).types
    inputs = {name: (types[name].dtype, types[name].shape) for name in load(model).inputs}
    rows = list(random_feeds(inputs, SAMPLES, 0))
    np.savez(file, **{name: np.concatenate([row[name] for row in rows]) for name in rows[0]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--evaluations", type=int, default=16)
    options = parser.parse_args()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = {"use": options.model, "label": "net"}
    searched = run_experiment(
        folder,
        "search",
        models=[model],
        searchers=["auto"],
        baselines=[],
        budget={"evaluations": [options.evaluations]},
    )
    (shipped,) = (searched / "ship").iterdir()
    (float_model,) = searched.glob("*/models/float.onnx")
    write_calibration(float_model, folder / "calibration.npz")
    starts: list[Any] = ["float", {"use": "placement", "params": {"path": str(shipped)}, "label": "ours"}]
    for tool in TOOLS:
        script, made = folder / f"quantize_by_{tool}.py", folder / f"{tool}.onnx"
        run_qdq("apply", str(shipped), "--recipe", tool, "-o", str(script))
        command = [sys.executable, str(script), str(float_model), str(folder / "calibration.npz"), str(made)]
        subprocess.run(command, check=True)
        starts.append({"use": "import", "params": {"path": str(made)}, "label": tool})
    timed = run_experiment(folder, "share", models=[model], searchers=[], initial=starts, baselines=["ours", *TOOLS])
    rows = main_frame(load_results(timed)).set_index("method")
    saved = 1 - 1 / rows["speedup"]
    for name in ("ours", *TOOLS):
        low, high = rows["speedup_low"][name], rows["speedup_high"][name]
        share = saved[name] / saved["ours"]
        print(f"{name}: {rows['speedup'][name]:.2f}x [{low:.2f}, {high:.2f}], {share:.0%} of the time saved")


if __name__ == "__main__":
    main()
