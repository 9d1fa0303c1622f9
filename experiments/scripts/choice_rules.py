"""Compare rules that choose the fastest file within a bound, on random halves of a model's images.

    python experiments/scripts/choice_rules.py experiments/recovery_mobilenet.yaml --out out/choice [--bound 0.005]

Needs QDQ_ASSETS, and takes about ten minutes a model. Linear operators are quantized, all of them or random parts, as
given and with recovery; each file is scored on all images. A rule then sees the scores of one half of the images, and
its choice is judged on the other. No latency is measured: more quantized operators count as faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from harness.accuracy.calibration.ranges import CalibrationBatches
from harness.accuracy.metrics.intervals import SURELY_WITHIN, recompute_metric
from harness.accuracy.recovery.pipeline import create_steps, recover, split_held_out
from harness.base.progress import NullProgress
from harness.plugins.api import Accuracy
from harness.results.cross_fitting import MeasuredLoss, estimate_losses
from harness.run.prepare.accuracy import make_scoring
from harness.run.prepare.accuracy_store import AccuracyStore
from harness.run.prepare.model_loader import input_types
from harness.run.prepare.study_task import StudyTask, make_study, prepare_study
from harness.run.prepare.task import Task
from harness.run.select.recovery import RECOVERY_STEPS, list_choices, open_placer
from harness.workers.sandbox import open_engines
from search.space import Resolved

FLOAT_SHARES = (0.1, 0.2, 0.3, 0.5, 0.7)
BOOTSTRAP_DRAWS = 400
Values = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredFile:
    """Score of one file, with the number of quantized edges as its speed."""

    edges: int
    recovered: bool
    sqnr_db: float
    score: Accuracy


def placements(task: Task, count: int) -> Iterator[Resolved]:
    """Yield all linear operators, then random parts of them."""
    linear = task.space.resolve(task.space.quantize_roles(("linear",)))
    consumers = sorted({edge.consumer for edge, _ in linear})
    rng = np.random.default_rng(0)
    yield linear
    for _ in range(count - 1):
        share = rng.choice(FLOAT_SHARES)
        left_out = {name for name in consumers if rng.random() < share}
        yield tuple((edge, precision) for edge, precision in linear if edge.consumer not in left_out)


def score_files(study: StudyTask, folder: Path, count: int) -> tuple[str, Accuracy, list[ScoredFile]]:
    """Return the metric, the score of the float model, and those of all files; known scores are used again."""
    observer = NullProgress()
    task, worker = prepare_study(study, folder, observer)
    scoring = make_scoring(study.experiment.objective, study.spec.model, task.model, task.work)
    feeds = CalibrationBatches(study.spec.model, task.model, input_types(task.model))
    placer = open_placer(task, list_choices(task), feeds, feeds.count, observer)
    batches, files = list(feeds), list[ScoredFile]()
    with open_engines(worker, study.experiment.limits) as engines:
        store = AccuracyStore(folder, engines, observer)
        reference = store.require_float_score(task.model_file)
        for number, resolved in enumerate(placements(task, count)):
            ranked = placer.rank(resolved, split_held_out(batches)[1])
            given = next(each for each in ranked if each.placed.choices == task.choices)
            best = ranked[0]
            recalibrate = placer.recalibration(best.placed.choices, batches)
            placed, gains = recover(best.placed, create_steps(RECOVERY_STEPS), batches, recalibrate, observer)
            after_db = [gain.after_db for gain in gains if gain.kept and gain.after_db is not None]
            for name, model, sqnr_db in (
                ("given", given.placed, given.sqnr_db),
                ("recovered", placed, after_db[-1] if after_db else best.sqnr_db),
            ):
                score = store.score_file(model.export(folder / f"{number}-{name}.onnx"), name)
                if isinstance(score, Accuracy):
                    recovered = name == "recovered"
                    files.append(ScoredFile(edges=len(resolved), recovered=recovered, sqnr_db=sqnr_db, score=score))
    return scoring.metric or "", reference, files


def choices(losses: Values, stderrs: Values, files: list[ScoredFile], bound: float) -> dict[str, int | None]:
    """Return the file that each rule chooses by the losses on one half."""
    measured = [
        MeasuredLoss(loss=float(loss), stderr=float(stderr), sqnr_db=file.sqnr_db)
        for loss, stderr, file in zip(losses, stderrs, files, strict=True)
    ]
    estimated = np.array(estimate_losses(measured))
    sure = ndtr((bound - losses) / np.maximum(stderrs, np.finfo(float).tiny)) >= SURELY_WITHIN
    needless = np.array([file.recovered and bool(sure[i - 1]) for i, file in enumerate(files)])
    fewer = np.full(len(files), np.inf)
    fewer[~needless] = estimate_losses(
        [each for each, left_out in zip(measured, needless, strict=True) if not left_out]
    )
    within, recovered = losses <= bound, np.array([file.recovered for file in files])

    def fastest(allowed: npt.NDArray[np.bool_], expected: Values) -> int | None:
        places = np.flatnonzero(allowed)
        return min(places.tolist(), key=lambda i: (-files[i].edges, expected[i]), default=None)

    given = fastest(within & ~recovered, losses)
    missed = np.array([file.recovered and not within[i - 1] for i, file in enumerate(files)])
    return {
        "as given": given,
        "those that miss the bound recovered": fastest(within & (missed | ~recovered), losses),
        "all recovered": fastest(within, losses),
        "all recovered, estimated losses": fastest(within & (estimated <= bound), estimated),
        "those not surely within recovered, estimated losses": fastest(within & (fewer <= bound), fewer),
    }


def report(reference: Accuracy, files: list[ScoredFile], metric: str, bound: float, halves: int) -> str:
    """Return a table of the rules over random halves."""
    draws = partial(_draws, metric=metric)
    known = recompute_metric(reference.evidence, metric, lambda count: np.ones((1, count), np.int64))
    images = 0 if known is None else known[1]
    rng = np.random.default_rng(0)
    first = np.zeros((halves, images), np.int64)
    for row in first:
        row[rng.permutation(images)[: images // 2]] = 1
    boot = rng.multinomial(images, np.full(images, 1 / images), size=BOOTSTRAP_DRAWS)
    seen, unseen, resampled = (
        np.array([draws(reference, weights=w) - draws(file.score, weights=w) for file in files])
        for w in (first, 1 - first, boot)
    )
    stderrs = resampled.std(axis=1) * np.sqrt(2)  # of one half
    most = max(file.edges for file in files)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for half in range(halves):
        for rule, place in choices(seen[:, half], stderrs, files, bound).items():
            loss = 0.0 if place is None else float(unseen[place, half])
            share = 0.0 if place is None else files[place].edges / most
            found.setdefault(rule, []).append((loss, float(loss <= bound), share if loss <= bound else 0.0))
    lines = ["| rule | loss on the other half | within the bound there | quantized share of those within |",
             "|---|---|---|---|"]  # fmt: skip
    for rule, rows in found.items():
        loss, within, share = np.mean(rows, axis=0)
        lines.append(f"| {rule} | {loss:+.4f} | {within:.0%} | {share:.2f} |")
    return "\n".join(lines)


def _draws(accuracy: Accuracy, metric: str, weights: Counts) -> Values:
    found = recompute_metric(accuracy.evidence, metric, lambda images: weights)
    if found is None:
        raise SystemExit(f"no {metric} by image")
    return found[0]


def main(arguments: Mapping[str, Any]) -> None:
    """Score the files of each study and print a table of the rules."""
    for path in arguments["studies"]:
        study = make_study(path, timed=False)
        folder = arguments["out"] / study.spec.model.name
        folder.mkdir(parents=True, exist_ok=True)
        metric, reference, files = score_files(study, folder, arguments["placements"])
        print(f"{study.spec.model.name}, {metric}, bound {arguments['bound']}\n")
        print(report(reference, files, metric, arguments["bound"], arguments["halves"]) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bound", type=float, default=0.005)
    parser.add_argument("--placements", type=int, default=8)
    parser.add_argument("--halves", type=int, default=200)
    main(vars(parser.parse_args()))
