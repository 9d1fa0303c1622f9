"""Print the speed of common steps on one checkout over that on another, by processor time, in turns of one run.

    git worktree add ../old 3ca0195
    python experiments/scripts/speed_ratio.py . ../old

Above 1, the first checkout is faster. Insertion (20 placements) and discovery are those of an encoder of 4,223 nodes,
`replay` of 40 random searches of 100 evaluations and one of `auto`, a run
of `qdq run` on the simulated runtime with its report.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from large_report import MODEL, command_module, run_python, write_experiment

CHILD = '''
import contextlib, io, itertools, json, sys, tempfile, time
from importlib import import_module
from pathlib import Path
checkout, scratch, command = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
sys.path.insert(0, str(checkout / "tests" / "benchmarks"))
import test_discovery_benchmark as discovery, test_insert_benchmark as insertion

def find(name, *modules):
    """Return an object by its name, from the first module that the checkout has; older names come first."""
    for module in modules:
        with contextlib.suppress(ImportError):
            return getattr(import_module(module), name)

read_table = find("read_table", "harness.tables", "harness.benchmark_table", "harness.runtimes.replay")
landscapes = "harness.studies.landscape", "harness.studies.recorded_landscape", "harness.replay.replay"
Landscape = find("Landscape", *landscapes)
replay_once = find("replay_once", "harness.studies.replay", "harness.replay.replay")
AutoSearcher = find("AutoSearcher", "search.algorithms.auto", "search.algorithms.model_based")
from search.algorithms.random import RandomSearcher

def insert(dialect):
    inserter = insertion.Inserter(model, dialect, dict.fromkeys(model.types, (-1.0, 1.0)))
    asked = itertools.cycle(insertion.placements(model, dialect, 20))
    inserter.write(next(asked), scratch)
    return lambda: [inserter.write(next(asked), scratch, name="asked") for _ in range(20)]

def replay(searcher, seeds):
    for seed in range(seeds):
        space = landscape.table.subspace.space
        replay_once(landscape, searcher(space, seed=seed), budget=100, seed=seed)

def run(name):
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        try:
            import_module(command).main(["run", str(scratch / name), "--out", out + "/run"])
        except SystemExit as end:
            assert not end.code

model = insertion.ready("encoder86")
landscape = Landscape(read_table(checkout / "results" / "tables" / "resnet18-openvino-f32.parquet"))
steps = {f"insertion, {dialect.name}": insert(dialect) for dialect in insertion.DIALECTS}
steps["discovery"] = lambda: discovery.anew(model)
steps |= {"replay, random": lambda: replay(RandomSearcher, 40), "replay, auto": lambda: replay(AutoSearcher, 1)}
steps |= {"run of 50": lambda: run("short.yaml"), "run of 1,000": lambda: run("long.yaml")}
print(json.dumps(list(steps)), flush=True)
for line in sys.stdin:
    started_s = time.process_time()
    steps[json.loads(line)]()
    print(json.dumps(time.process_time() - started_s), flush=True)
'''


class Turns:
    """A process that runs steps of a checkout, one at a time."""

    def __init__(self, checkout: Path, scratch: Path) -> None:
        scratch.mkdir()
        run_python(checkout, MODEL, scratch / "net.onnx")
        for name, evaluations in (("short", 50), ("long", 1000)):
            write_experiment(
                scratch / f"{name}.yaml", 1, 1, evaluations, searchers=["random"], seeds=[0], sharing="region"
            )
        own = checkout / ".venv" / "bin" / "python"  # knows the plug-ins of the checkout
        python = own if own.exists() else sys.executable
        command = [str(python), "-c", CHILD, str(checkout), str(scratch), command_module(checkout)]
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._child = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.steps: list[str] = json.loads(self._child.stdout.readline())

    def run_step(self, step: str) -> float:
        """Return the processor time of a step in seconds."""
        self._child.stdin.write(json.dumps(step) + "\n")
        self._child.stdin.flush()
        return float(self._child.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._child.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs=2)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--only", default="", help="part of the names of the steps to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        pair = [Turns(each.resolve(), Path(scratch) / str(n)) for n, each in enumerate(options.checkouts)]
        print("| step | time (ms) | time of the other (ms) | speed over the other [quartiles] |\n|---|---|---|---|")
        for step in (step for step in pair[0].steps if options.only in step):
            spent = np.array([[each.run_step(step) for each in pair] for _ in range(1 + options.turns)])[1:]
            low, middle, high = np.quantile(spent[:, 1] / spent[:, 0], (0.25, 0.5, 0.75))
            ours_ms, theirs_ms = 1e3 * np.median(spent, axis=0)
            print(f"| {step} | {ours_ms:.0f} | {theirs_ms:.0f} | {middle:.2f} [{low:.2f}, {high:.2f}] |", flush=True)
        for each in pair:
            each.close()


if __name__ == "__main__":
    main()
