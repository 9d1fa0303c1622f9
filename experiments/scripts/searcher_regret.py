"""Print the regret and the processor time of `auto` on synthetic problems, on one checkout and on another.

    git worktree add ../old 3ca0195
    python experiments/scripts/searcher_regret.py . ../old --seeds 20 --evaluations 2000

Each seed has a space, a landscape and noise of its own, the same for both checkouts. The regret is that of the
placement with the lowest reading (noise 1 %): its noise-free latency over the optimum, less 1. The ratio of the mean
regrets has a 95 % interval by the bootstrap over seeds. A search of 2,000 evaluations takes half a minute, on commit
3ca0195 six.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

CHILD = """
import json, sys, time
from importlib import import_module
seed, evaluations = map(int, sys.argv[1:])
try:
    problem, algorithm = import_module("search.synthetic_problem"), import_module("search.algorithms.model_based")
    make_space, Objective = problem.synthetic_space, problem.SyntheticObjective
    initial = problem.common_initial_placements
except ModuleNotFoundError:  # the names of commit 3ca0195
    problem, algorithm = import_module("search.planted"), import_module("search.algorithms.auto")
    make_space, Objective, initial = problem.planted_space, problem.PlantedObjective, problem.common_seeds
space = make_space(40, seed=seed)
objective, searcher = Objective(space, seed=seed), algorithm.AutoSearcher(space, seed=seed)
asked, known, own_s = list(initial(space)), {}, 0.0
while asked and len(known) < evaluations:
    told = [objective.observe(placement) for placement in asked]
    started_s = time.process_time()
    for observation in told:
        searcher.tell(known.setdefault(observation.digest, observation))
    asked = list(searcher.ask(1))
    own_s += time.process_time() - started_s
best = min(known.values(), key=lambda observation: observation.outcome.objective)
optimum_ms = objective.latency_ms(objective.optimum)
print(json.dumps([objective.regret(best.placement), own_s, len(known), optimum_ms]))
"""


def run_search(checkout: Path, seed: int, evaluations: int) -> Any:
    """Return regret, the searcher's processor time in seconds, the number of evaluations, and the optimal latency."""
    command = [sys.executable, "-c", CHILD, str(seed), str(evaluations)]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # The working folder comes before PYTHONPATH.
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--evaluations", type=int, default=2000)
    options = parser.parse_args()
    print("| seed | regret (%) | time (s) | regret of the other (%) | time (s) |\n|---|---|---|---|---|")
    pairs = []
    for seed in range(options.seeds):
        one, two = (run_search(each.resolve(), seed, options.evaluations) for each in (options.checkout, options.other))
        if not np.isclose(one[3], two[3]):
            raise SystemExit(f"seed {seed}: the checkouts do not have the same problem ({one[3]} and {two[3]} ms)")
        pairs.append((one, two))
        print(f"| {seed} | {100 * one[0]:.3f} | {one[1]:.1f} | {100 * two[0]:.3f} | {two[1]:.1f} |", flush=True)
    regret = np.array([[one[0], two[0]] for one, two in pairs])
    drawn = np.random.default_rng(0).integers(len(pairs), size=(10_000, len(pairs)))
    means = regret[drawn].mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.nanquantile(means[:, 0] / means[:, 1], (0.025, 0.975))
        ratio = np.divide(*regret.mean(axis=0))
    own_s, other_s = (sum(pair[which][1] for pair in pairs) for which in (0, 1))
    equal = int((regret[:, 0] == regret[:, 1]).sum())
    print(f"regret {ratio:.2f} times [{low:.2f}, {high:.2f}], {equal} of {len(pairs)} pairs equal; "
          f"time {own_s:.0f} and {other_s:.0f} s, {other_s / own_s:.1f} times")  # fmt: skip


if __name__ == "__main__":
    main()
