"""Print what the report of many tasks takes on this checkout and on others, in one run.

    git worktree add ../old 3ca0195
    python experiments/scripts/large_report.py . ../old

Each checkout runs one experiment of two tasks on the simulated runtime, copies them under other labels in its own
format, and reports the copies in a process of its own. The journals of both checkouts are of the same length, but not
equal. Commit 3ca0195 takes 12 minutes with the default sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import yaml

CHILD = """
import json, resource, sys
from {} import main
try:
    main(["report", sys.argv[1]])
except SystemExit as end:
    assert not end.code
use = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps([sum(u.ru_utime + u.ru_stime for u in use), max(u.ru_maxrss for u in use) / 2**10]))
"""
COMMAND = "import sys; from {} import main; main(sys.argv[1:])"
MODEL = """
import sys
from pathlib import Path
try:
    from harness.graph.builder import GraphBuilder
except ModuleNotFoundError:
    from harness.graph.build import GraphBuilder
builder = GraphBuilder("net", seed=1)
x = builder.input("x", (1, 3, 8, 8))
for _ in range(50):
    x = builder.op("Relu", builder.conv(x, 8, 3, pad=1))
builder.output(builder.op("GlobalAveragePool", x))
builder.save(Path(sys.argv[1]))
"""


def write_experiment(path: Path, models: int, backends: int, evaluations: int, **changes: Any) -> None:
    """Write an experiment of tasks of one model, under as many labels, on simulated runtimes; four searches a task.

    Args:
        path: File to write, next to `net.onnx`.
        changes: Further keys of the experiment.
    """
    body = {
        "experiment": "load",
        "models": [{"use": "net.onnx", "label": f"m{n:03}", "calibration": {"samples": 2}} for n in range(models)],
        "backends": [
            {"use": "simulated", "label": f"sim{n:02}", "params": {"seed": n, "noise_seed": 1}} for n in range(backends)
        ],
        "searchers": ["random", "evolutionary"],
        "seeds": [0, 1],
        "initial": ["float", "all"],
        "baselines": ["all"],
        "budget": {"evaluations": [evaluations]},
        "sampling": {"warmup_ms": 0, "min_samples": 11, "max_samples": 20},
        "confirmation": {"builds": 3, "rounds": 2, "samples": 3},
        **changes,
    }
    path.write_text(yaml.safe_dump(body))


def run_python(checkout: Path, *arguments: object) -> str:
    """Run a program with the packages of a checkout, and return what it prints."""
    command = [sys.executable, "-c", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    # the working folder comes before PYTHONPATH
    return subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def command_module(checkout: Path) -> str:
    """Return the module of the command `qdq`, which was moved after commit 3ca0195."""
    return "harness.cli.main" if (checkout / "harness" / "cli").exists() else "harness.cli"


def rename_task(path: Path, model: str) -> None:
    """Replace the label in the facts of a copied task, and its checksum, which commit 3ca0195 has not."""
    body = json.loads(path.read_text().replace("m000", model))
    has_checksum = body.pop("crc32", None) is not None
    text = json.dumps(body, separators=(",", ":"))
    path.write_text(f'{text[:-1]},"crc32":"{zlib.crc32(text[:-1].encode()):08x}"}}\n' if has_checksum else text)


def write_results(checkout: Path, folder: Path, tasks: int, evaluations: int) -> Path:
    """Write a results folder in the format of a checkout, and return it."""
    if not list(checkout.glob("*.egg-info")):  # names of plug-ins
        subprocess.run([sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "egg_info"],
                       cwd=checkout, check=True)  # fmt: skip
    run_python(checkout, MODEL, folder / "net.onnx")
    write_experiment(folder / "two.yaml", 1, 2, evaluations, sharing="region")
    run_python(checkout, COMMAND.format(command_module(checkout)), "run", folder / "two.yaml", "--out", folder / "two")
    results = folder / "many"
    results.mkdir()
    write_experiment(results / "experiment.yaml", tasks // 2, 2, evaluations, sharing="region")
    for number in range(tasks // 2):
        for task in (path.parent for path in (folder / "two").glob("m000-*/env.json")):
            copy = results / task.name.replace("m000", f"m{number:03}")
            shutil.copytree(task, copy, ignore=shutil.ignore_patterns("optuna.journal"))
            for name in ("task.json", "cell.json"):
                if (copy / name).exists():
                    rename_task(copy / name, f"m{number:03}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="+")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--evaluations", type=int, default=300)
    options = parser.parse_args()
    print("| checkout | processor time (s) | memory (MiB) | page (MB) | plots |\n|---|---|---|---|---|")
    for checkout in (path.resolve() for path in options.checkouts):
        with tempfile.TemporaryDirectory() as scratch:
            results = write_results(checkout, Path(scratch), options.tasks, options.evaluations)
            cpu_s, most_mib = json.loads(
                run_python(checkout, CHILD.format(command_module(checkout)), results).splitlines()[-1]
            )
            page_mb = (results / "report" / "index.html").stat().st_size / 1e6
            plots = len(list((results / "report").rglob("*.svg")))
            print(f"| {checkout} | {cpu_s:.0f} | {most_mib:.0f} | {page_mb:.1f} | {plots} |", flush=True)


if __name__ == "__main__":
    main()
