"""A results folder whose one search has as many evaluations as one likes; its journal is written from templates."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from stored import JOURNAL_HEADER, write_records

from harness.base.files import write_json
from harness.config.experiment import parse_experiment, to_yaml
from harness.measure.records import SCHEMA_VERSION, Failed, Measured, Outcome, Proposal, TrialResult, encode_line
from harness.measure.turn_log import TWIN, Turn, encode_turn_event
from harness.results.artifacts import FLOAT_ROW, Choice, ExportedModel
from harness.results.lines import seal_line
from harness.results.search_log import Goal

__all__ = ["TASK", "write_long_results"]

TASK = "net-simulated-int8"
EXPERIMENT = """
experiment: long
models: [{use: net.onnx, label: net}]
backends: [simulated]
searchers: [random]
initial: [float]
baselines: []
budget: {evaluations: [25, 50]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""
POINTS, SAMPLES, TEMPLATES = 60, 11, 997
GOAL = Goal(metric="top1", reference=0.8, max_drop=0.02)


def write_long_results(folder: Path, evaluations: int) -> Path:
    """Two seeds: one of this number of evaluations, all scored, and one that ended after ten; returns the long journal.

    Latency falls from 10 to 5 ms over the run, in readings with noise; every 997th evaluation fails.
    """
    task = folder / TASK
    (task / "runs").mkdir(parents=True)
    (folder / "experiment.yaml").write_text(to_yaml(parse_experiment(EXPERIMENT, "long")))
    backend = {"name": "simulated", "device": "simulated", "options": {}, "float_precision": "f32"}
    facts = {
        "schema": SCHEMA_VERSION,
        "task": TASK,
        "model": "net",
        "precision": "int8",
        "backend": backend,
        "goal": asdict(GOAL),
    }
    write_json(task / "task.json", {**facts, "calibrated_on": "8 samples", "metric": "top1", "higher_is_better": True})
    rows = [
        ExportedModel(id=name, file=f"{name}.onnx", sha256=name, pairs=pairs)
        for name, pairs in ((FLOAT_ROW, 0), ("aa", 9))
    ]
    picks = [
        Choice(method="float", kind="float", row=FLOAT_ROW),
        Choice(method="random", kind="search", row="aa", seed=0, budget=50, search_ms=5.0, minutes=1.0),
    ]
    write_json(task / "rows.json", {"rows": [asdict(row) for row in rows], "picks": [asdict(pick) for pick in picks]})
    write_json(task / "accuracy.json", {f"{row.id} main": {"metrics": {"top1": 0.8}, "per_item": []} for row in rows})
    turns = [
        Turn(build=build, group=0, round=turn, row=row, samples_ms=(ms, ms, ms))
        for build in range(3)
        for turn in range(2)
        for row, ms in ((TWIN, 10.0), (FLOAT_ROW, 10.0), ("aa", 5.0))
    ]
    header = json.dumps({"kind": "header", "plan": {"builds": 3, "rounds": 2}})
    write_records(task / "confirmation.jsonl", (header, *map(encode_turn_event, turns)))
    _write_journal(task / "runs" / "random-1.jsonl", 10)
    return _write_journal(task / "runs" / "random-0.jsonl", evaluations)


def _write_journal(path: Path, evaluations: int) -> Path:
    rng = np.random.default_rng(evaluations)
    text, digest = seal_line(JOURNAL_HEADER, "")
    asked = [_template(Proposal(number=-1, choices=_choices(rng), digest="-2", origin="searcher")) for _ in range(99)]
    with path.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        for number in range(evaluations):
            if number % TEMPLATES == 0:  # anew, a little faster than before
                told = [_told(rng, 10.0 * 0.5 ** (number / evaluations), n) for n in range(TEMPLATES)]
            line = asked[number % 99] if number else _template(_float())
            for text in (line % (number, f'"{number:016x}"'), told[number % TEMPLATES] % (number, number / 2)):
                line, digest = seal_line(text, digest)
                file.write(line + "\n")
    return path


def _choices(rng: np.random.Generator) -> tuple[int, ...]:
    return (1, *(int(choice) for choice in rng.integers(0, 2, POINTS - 1)))


def _float() -> Proposal:
    return Proposal(number=-1, choices=(0,) * POINTS, digest="-2", origin="initial:float")


def _told(rng: np.random.Generator, latency_ms: float, number: int) -> str:
    outcome: Outcome = Failed(stage="build", reason="refused", wall_s=0.1)
    if number != TEMPLATES - 1:
        latency_ms *= 1.0 if number == 0 else float(np.exp(abs(0.1 * rng.standard_normal())))
        outcome = Measured(
            samples_ms=tuple(np.round(latency_ms * np.exp(0.01 * rng.standard_normal(SAMPLES)), 6).tolist()),
            build_s=0.1,
            measure_s=0.1,
            evaluate_s=0.1,
            metrics={"top1": round(0.8 - 0.03 * float(rng.random()), 4)},
            info={"truth_ms": latency_ms},
        )
    return _template(TrialResult(number=-1, outcome=outcome, elapsed_s=-2.0))


def _template(line: Proposal | TrialResult) -> str:
    """A line with %-fields where the number and the digest, or the time, belong."""
    text = encode_line(line).replace("%", "%%").replace('"number":-1', '"number":%d')
    return text.replace('"digest":"-2"', '"digest":%s').replace('"elapsed_s":-2.0', '"elapsed_s":%.1f')
