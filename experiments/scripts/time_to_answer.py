"""Print how soon `qdq autotune` delivers confirmed files on one checkout, as shares of the time of another.

    git worktree add ../old 3ca0195
    QDQ_ASSETS=FOLDER python experiments/scripts/time_to_answer.py . ../old

Each checkout searches seven models with `auto` (OpenVINO, one thread), one run after the other. The columns are the
times until the first confirmed file, until a file with 97 % of the best confirmed speedup of both checkouts, and until
the end. Needs an idle machine for about 40 minutes. Each checkout needs entry points of its own (`pip install -e .`, or
`python setup.py egg_info` in it).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from large_report import command_module

MODELS = {
    "resnet18": ("zoo:resnet18",),
    "encoder6": ("zoo:encoder6",),
    "mobilenet": ("assets:models/mobilenet_v1_0.75_224.onnx", "--shape", "input:1x3x224x224"),
    "squeezenet": ("assets:models/squeezenet1.1.onnx", "--shape", "data:1x3x224x224"),
    "deit_tiny": ("assets:models/deit_tiny_patch16_224.onnx", "--shape", "input:1x3x224x224"),
    "nanodet": ("assets:models/nanodet_m_320.onnx",),
    "yolox_nano": ("assets:models/yolox_nano.onnx",),
}
CLOSE_SHARE = 0.97
#: Lines of a confirmed file: the early one and the answer; commit 3ca0195 has one, after the confirmation.
CONFIRMED = re.compile(r"(?:^|: )take .*?: (?P<new>[\d.]+)x|^Final: .*?\((?P<old>[\d.]+)x speedup")


@dataclass(frozen=True)
class Answers:
    """Confirmed speedups of a run, with the time of each in seconds, and the time of the whole run."""

    speedups: tuple[tuple[float, float], ...]
    total_s: float

    def first_s(self) -> float:
        return self.speedups[0][0]

    def close_s(self, best: float) -> float:
        """Return the time until a file has nearly the best speedup, or that of the whole run without one."""
        return next((at for at, speedup in self.speedups if speedup >= CLOSE_SHARE * best), self.total_s)


def autotune(checkout: Path, model: tuple[str, ...], evaluations: int) -> Answers:
    command = [sys.executable, "-u", "-m", command_module(checkout), "autotune", "-m", *model]
    with tempfile.TemporaryDirectory() as out:
        command += ["-o", f"{out}/run", "--searcher", "auto", "--max_evals", str(evaluations)]
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        started_s, found = time.monotonic(), []
        with subprocess.Popen(
            command, cwd=out, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as child:
            assert child.stdout
            lines = []
            for line in child.stdout:
                lines.append(line)
                if match := CONFIRMED.search(line):
                    found.append((time.monotonic() - started_s, float(match["new"] or match["old"])))
        if child.returncode or not found:
            sys.exit(f"{' '.join(command)}: ended with status {child.returncode}:\n{''.join(lines[-12:])}")
        return Answers(tuple(found), time.monotonic() - started_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs=2)
    parser.add_argument("--evaluations", type=int, default=25)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    ours_at, theirs_at = (each.resolve() for each in options.checkouts)
    print("| model | first file (s) | of the other | 97 % (s) | of the other | end (s) | of the other | speedups |")
    print("|---|---|---|---|---|---|---|---|")
    ratios = []
    for name in options.models:
        ours, theirs = (autotune(each, MODELS[name], options.evaluations) for each in (ours_at, theirs_at))
        best = max(speedup for each in (ours, theirs) for _, speedup in each.speedups[-1:])
        pairs = [
            (ours.first_s(), theirs.first_s()),
            (ours.close_s(best), theirs.close_s(best)),
            (ours.total_s, theirs.total_s),
        ]
        ratios.append([own / other for own, other in pairs])
        speedups = f"{ours.speedups[0][1]:.2f}, {ours.speedups[-1][1]:.2f}; {theirs.speedups[-1][1]:.2f}"
        print(f"| {name} | " + " | ".join(f"{a:.0f} | {b:.0f}" for a, b in pairs) + f" | {speedups} |", flush=True)
    means = np.exp(np.log(ratios).mean(axis=0))
    print("geometric means of the ratios: " + ", ".join(f"{mean:.2f}" for mean in means))


if __name__ == "__main__":
    main()
