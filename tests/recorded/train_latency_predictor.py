"""Train `harness/graph/qdq/latency_predictor.json` on the committed readings, and print its leave-one-model-out table.

    QDQ_ASSETS=FOLDER python tests/recorded/train_latency_predictor.py [--write]

Readings are the replay tables and the journals of searches below `results` whose space is rebuilt equal, by its digest,
or is in a table. A model that is not there is left out; `experiments/held_out.yaml` says how to get PP-OCR's. Takes two
minutes on one core. Columns: the best of `all`, the first rules and predictions (five in all), of five fixed rows, of
five drawn at random, and ModelOpt's placement, all as shares of the best speed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import wilcoxon

from harness.base.errors import UserError
from harness.base.files import read_json
from harness.config.sections import ModelSpec
from harness.graph.model import Model
from harness.graph.qdq import latency_predictor
from harness.graph.qdq.latency_predictor import COLUMNS, FIRST_RULES, PlacementFeatures, choose_portfolio, runtime_key
from harness.graph.qdq.space import build_space
from harness.graph.rules import placement_rules
from harness.graph.rules.dialects import load_dialect
from harness.measure.records import Measured
from harness.replay.bench.tasks import read_catalogue, table_path
from harness.replay.recorded_landscape import Landscape
from harness.results.journal import read_journal
from harness.run.prepare.model_loader import open_model
from harness.runtimes.benchmark_table import BenchmarkTable, read_table, space_digest
from search.heuristics import HEURISTIC_RULES
from search.space import Placement, Space

ROOT = Path(__file__).parents[2]
SHAPES = {
    "squeezenet": {"data": "1x3x224x224"}, "mobilenet": {"input": "1x3x224x224"}, "deit": {"input": "1x3x224x224"},
    "v4_rec": {"x": "1x3x48x320"}, "v4_det": {"x": "1x3x320x320"}, "mobile_v2": {"x": "1x3x48x192"},
    "magika": {"bytes": "1x2048"},
}  # fmt: skip
INT8_DEVICES = ("AMD EPYC", "Intel(R) Xeon(R) Processor")
"""Names of devices in records from before the name had the instructions: without and with VNNI."""
PENALTY, OTHER_CONTEXT_WEIGHT, FULL_WEIGHT_ROWS = 0.01, 0.03, 30
REFERENCE_SPREAD = 0.15  # a float reading beyond it was disturbed
MIN_PLACEMENTS, PROPOSALS, RANDOM_DRAWS = 90, 5, 2000
FIXED = ("float", "all", "linear", "linear_add", "movers")


@dataclass(kw_only=True)
class Readings:
    """Readings of one task: distinct placements, features, log latencies relative to the float model."""

    name: str = ""
    model: str
    key: str
    space: Space
    placements: list[Placement]
    features: Any
    log_ratios: Any
    modelopt: tuple[int, ...] | None = None
    table: BenchmarkTable | None = None

    @cached_property
    def moments(self) -> tuple[Any, Any]:
        return self.features.T @ self.features, self.features.T @ self.log_ratios


def open_source(source: str, work: Path) -> Model:
    if source.endswith("/ppocrv2_cls.onnx"):  # the tables of the benchmark name a copy of it
        source = "../out/held_out_models/rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"
    shapes = next((shapes for name, shapes in SHAPES.items() if name in source), {})
    return open_model(ModelSpec(use=source.replace("../out", str(ROOT / "out")), shapes=shapes), work)


def task_readings(
    model: Model, space: Space, facts: dict[str, Any], outcomes: Sequence[tuple[tuple[int, ...], Measured]]
) -> Readings:
    medians = [(choices, np.median(o.samples_ms), np.median(o.reference_ms or [np.nan])) for choices, o in outcomes]
    floats = [reading for choices, reading, _ in medians if not any(choices)]
    usual = float(np.nanmedian([reference for *_, reference in medians] + floats))
    found = defaultdict(list)
    for choices, reading, reference in medians:
        reference = reference if reference == reference else usual
        bounds = ((1 - REFERENCE_SPREAD) * usual, (1 + REFERENCE_SPREAD) * usual)
        found[choices].append(float(np.log(reading / np.clip(reference, *bounds))))
    placements = [Placement(choices) for choices in found]
    device = facts["device"] + {INT8_DEVICES[0]: " (AVX2)", INT8_DEVICES[1]: " (AVX512-VNNI)"}.get(facts["device"], "")
    return Readings(
        model=model.source,
        key=runtime_key({**facts, "device": device}),
        space=space,
        placements=placements,
        features=PlacementFeatures(model, space).encode(placements),
        log_ratios=np.array([np.median(values) for values in found.values()]),
    )


def read_all(work: Path) -> tuple[list[Readings], str]:
    """Return the readings of all tasks, and the SHA-256 of the files."""
    digest, tasks, skipped, used = hashlib.sha256(), [], 0, 0
    tables = [read_table(table_path(name)) for name in sorted(read_catalogue().tasks)]
    spaces = {space_digest(table.subspace.full_space): table.subspace.full_space for table in tables}
    models: dict[str, Model | None] = {}

    def model_of(source: str) -> Model | None:
        if source not in models:
            try:
                models[source] = open_source(source, work)
            except UserError as error:
                print(f"left out: {error}")
                models[source] = None
        return models[source]

    for table in tables:
        digest.update(table.path.read_bytes())
        model = model_of(table.metadata.source)
        if model is None:
            continue
        rows = [(row.choices, row.outcome) for row in table.rows.values() if isinstance(row.outcome, Measured)]
        used += len(rows)
        tasks.append(task_readings(model, table.subspace.full_space, table.metadata.backend, rows))
        tasks[-1].name, tasks[-1].table = table.path.stem, table
    for path in sorted(ROOT.glob("results/*/*/task.json")):
        facts = read_json(path)
        journals = sorted(path.parent.glob("runs/*.jsonl*"))
        rows = [row for journal in journals for row in journal_rows(journal)]
        if facts["precision"] != "int8" or not rows:
            continue
        model = model_of(facts["source"])
        space = None if model is None else spaces.get(facts["space"]) or rebuild_space(model, facts)
        fitting = [row for row in rows if space is not None and len(row[0]) == len(space)]
        skipped, used = skipped + len(rows) - len(fitting), used + len(fitting)
        if model is not None and space is not None and fitting:
            for journal in journals:
                digest.update(journal.read_bytes())
            tasks.append(task_readings(model, space, facts["backend"], fitting))
            tasks[-1].name = f"{path.parts[-3]}/{path.parts[-2]}"
            tasks[-1].modelopt = facts["placements"].get("modelopt_ptq")
    print(f"{used} readings of {len(tasks)} tasks and {len({t.model for t in tasks})} models; {skipped} left out")
    return tasks, digest.hexdigest()


def journal_rows(path: Path) -> Iterator[tuple[tuple[int, ...], Measured]]:
    for entry in read_journal(path):
        if entry.result is not None and isinstance(entry.result.outcome, Measured):
            yield entry.proposal.choices, entry.result.outcome


def rebuild_space(model: Model, facts: dict[str, Any]) -> Space | None:
    """Return the space of a record, or None; some were made before the rule "pole"."""
    known = placement_rules.find_pole_inputs
    for rule in (known, lambda _: frozenset()):
        placement_rules.find_pole_inputs = rule
        space = build_space(model, load_dialect(facts["dialect_use"]))
        placement_rules.find_pole_inputs = known
        if space_digest(space) == facts["space"]:
            return space
    return None


def fit(tasks: Sequence[Readings], key: str, without: frozenset[str]) -> Any:
    """Return the coefficients of one fit: ridge regression, each model and context with the same weight."""
    runtime, precision, instructions = key.split("/")
    chosen = [t for t in tasks if t.key.startswith(f"{runtime}/") and t.model not in without]
    counts = Counter[tuple[str, str]]()
    for task in chosen:
        counts[task.model, task.key] += len(task.placements)
    gram, moments, total = np.zeros((len(COLUMNS),) * 2), np.zeros(len(COLUMNS)), 0.0
    for task in chosen:
        _, other_precision, other_instructions = task.key.split("/")
        differences = (other_precision != precision) + (other_instructions != instructions)
        rows = counts[task.model, task.key]
        weight = OTHER_CONTEXT_WEIGHT**differences * min(1.0, rows / FULL_WEIGHT_ROWS) / rows
        gram += weight * task.moments[0]
        moments += weight * task.moments[1]
        total += weight * len(task.placements)
    scale = np.sqrt(np.diag(gram) / total) + 1e-3
    normal = gram / total / np.outer(scale, scale) + PENALTY * np.eye(len(COLUMNS))
    return np.linalg.solve(normal, moments / total / scale) / scale


def fits(tasks: Sequence[Readings], key: str, without: frozenset[str] = frozenset()) -> Any:
    """Return the fit on all models, and those without each of them."""
    models = sorted({t.model for t in tasks if t.key.split("/")[0] == key.split("/")[0]} - without)
    return np.array([fit(tasks, key, without), *(fit(tasks, key, without | {model}) for model in models)])


def rule_choices(name: str, space: Space) -> tuple[int, ...]:
    plain = {"float": space.float_placement, "all": space.quantize_all}
    return (plain[name]() if name in plain else HEURISTIC_RULES[name](space, None)).choices


def evaluate(tasks: Sequence[Readings]) -> None:
    """Print the speed of the best of the first five placements relative to the best, by table and by task."""
    rng = np.random.default_rng(0)
    lines = []
    for task in tasks:
        kind, key = "table" if task.table else "search", task.key
        latency, features, named = candidates(task, tasks)
        if len(latency) < MIN_PLACEMENTS:
            continue
        predicted = latency_predictor.predict_log_ratios(features, fits(tasks, key, frozenset({task.model})))
        first = ("all", *FIRST_RULES.get(key.split("/")[0], ()))
        known = list(dict.fromkeys(named[name] for name in first if name in named))
        ours = [*known, *choose_portfolio(predicted, PROPOSALS - len(known), known)]
        fixed = [named[name] for name in FIXED if name in named]
        drawn = [latency[rng.choice(len(latency), PROPOSALS)].min() for _ in range(RANDOM_DRAWS)]
        modelopt = latency[named["modelopt"]] if "modelopt" in named else np.nan
        best = latency.min()
        values = best - np.array([latency[ours].min(), latency[fixed].min(), np.mean(drawn), modelopt])
        lines.append((kind, key.split("/")[0], *np.exp(values)))
        print(
            f"| {kind} | {task.name} | {key} | {len(latency)} | "
            + " | ".join(f"{v:.3f}" for v in np.exp(values))
            + " |"
        )
    for kind, runtime in sorted({line[:2] for line in lines}):
        values = np.array([line[2:] for line in lines if line[:2] == (kind, runtime)])
        means = np.exp(np.nanmean(np.log(values), 0))
        difference = np.log(values[:, 0] / values[:, 1])
        p = wilcoxon(difference).pvalue if np.any(difference) else 1.0
        won, lost = int((difference > 1e-9).sum()), int((difference < -1e-9).sum())
        print(
            f"| {kind} | mean of {len(values)} | {runtime} | | "
            + " | ".join(f"{v:.3f}" for v in means)
            + f" | {won} won, {lost} lost, p = {p:.3f}"
        )


def candidates(task: Readings, tasks: Sequence[Readings]) -> tuple[Any, Any, dict[str, int]]:
    """Return log latencies and features of the placements that may be proposed, and indices of named ones.

    Named placements of a table are those of the whole space, with the fixed dimensions at the table's choices.
    """
    space, latency, features = task.space, task.log_ratios, task.features
    names = {name: rule_choices(name, space) for name in FIXED}
    for other in (t for t in tasks if t.model == task.model and t.modelopt and len(t.modelopt) == len(space)):
        names["modelopt"] = tuple(other.modelopt or ())
    listed = [placement.choices for placement in task.placements]
    if task.table:
        subspace = task.table.subspace
        rows = {space.digest(placement): row for row, placement in enumerate(task.placements)}
        placements = [subspace.to_full_space(placement) for placement in subspace.placements()]
        listed = [placement.choices for placement in placements]
        features = features[[rows[space.digest(placement)] for placement in placements]]
        latency = np.log(
            Landscape(task.table).latency_ms
        )  # without the turns: the fastest were measured again in turns
        for name, choices in names.items():
            names[name] = subspace.to_full_space(Placement(tuple(choices[i] for i in subspace.varied))).choices
    return latency, features, {name: listed.index(choices) for name, choices in names.items() if choices in listed}


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        tasks, digest = read_all(Path(work))
    evaluate(tasks)
    keys = sorted({task.key for task in tasks})
    found = {key: fits(tasks, key) for key in keys}
    used = [i for i in range(len(COLUMNS)) if any(np.any(rows[:, i]) for rows in found.values())]
    body = {
        "version": 1,
        "training_sha256": digest,
        "models": sorted({Path(task.model.rpartition(":")[2]).stem for task in tasks}),
        "placements": sum(len(task.placements) for task in tasks),
        "columns": [COLUMNS[i] for i in used],
        "coefficients": {key: [[float(f"{v:.3g}") for v in row[used]] for row in rows] for key, rows in found.items()},
    }
    text = json.dumps(body, separators=(",", ":"))
    print(f"{len(text)} bytes, {len(used)} features, fits: { {key: len(rows) for key, rows in found.items()} }")
    if "--write" in sys.argv:
        Path(latency_predictor.__file__).with_name(latency_predictor.FILE_NAME).write_text(
            text + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
