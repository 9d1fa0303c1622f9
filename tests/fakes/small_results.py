"""Small results folder for tests of reports, written by the harness's own encoders and never timed."""

import base64
import gzip
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

from stored import read_records, write_records

from harness.base.files import file_sha256, read_json, write_json
from harness.config.experiment import parse_experiment, to_yaml
from harness.graph.builder import GraphBuilder
from harness.graph.io.files import write_model
from harness.graph.load import load_proto
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO
from harness.measure.records import SCHEMA_VERSION, Failed, Measured, Outcome, Proposal, TrialResult
from harness.measure.turn_log import TWIN, RowFailure, Turn, encode_turn_event
from harness.report.report_table import write_table
from harness.report.tables.catalog import build_tables
from harness.report.trace import trace_cell
from harness.results.artifacts import Choice, ExportedModel
from harness.results.folder import Results, load
from harness.results.journal import Journal
from harness.results.search_log import Goal

EXPERIMENT = """
experiment: small
models: [{use: net.onnx, label: net}, {use: other.onnx, label: other}]
backends: [{use: openvino, params: {precision: f32, threads: 2}}]
searchers: [random, tpe]
initial: [float, all]
baselines: [all, linear]
budget: {evaluations: [2, 3]}
seeds: [0, 1]
confirmation: {builds: 3, rounds: 2, samples: 3, top_k: 2}
"""
TASK = "net-openvino-int8"
FACTS = {
    "schema": SCHEMA_VERSION,
    "task": TASK,
    "model": "net",
    "calibrated_on": "8 samples",
    "dialect_use": "openvino",
    "precision": "int8",
    "metric": "top1",
    "higher_is_better": True,
    "backend": {
        "name": "openvino", "device": "A CPU", "options": {"threads": 2}, "float_precision": "f32",
        "float_open": False, "float_params": {"f32": {}, "bf16": {}},
    },
    "goal": asdict(Goal(metric="top1", reference=0.8, max_drop=0.02)),
}  # fmt: skip
LATENCY_MS = {TWIN: 8.0, "float": 8.0, "float-bf16": 10.0, "all": 2.0, "aa": 4.0, "bb": 5.0}
SCORES = {"float": 0.8, "float-bf16": 0.8, "all": 0.7, "aa": 0.79, "bb": 0.8}


def write_task(folder: Path, task_name: str = TASK, **changes) -> Path:
    """A finished task: two seeds of random, a tpe that found nothing, and a baseline that does not build."""
    task = folder / task_name
    (task / "runs").mkdir(parents=True)
    write_json(task / "task.json", {**FACTS, "task": task_name, **changes})
    scores = {f"sha of {row} main": {"metrics": {"top1": v}, "per_item": []} for row, v in SCORES.items()}
    write_json(task / "accuracy.json", scores)
    for seed in (0, 1):
        write_journal(task / "runs" / f"random-{seed}.jsonl")
    placed = {"aa": (1, 1), "bb": (1, 0)}
    ids = {"float": 0, "float-bf16": 0, "all": 9, "linear": 4, "aa": 5, "bb": 3}
    rows = [
        ExportedModel(
            id=name,
            file=f"{name.removesuffix('-bf16')}.onnx",
            sha256=f"sha of {name}",
            pairs=pairs,
            choices=placed.get(name),
        )
        for name, pairs in ids.items()
    ]
    write_json(task / "rows.json", {"rows": [asdict(r) for r in rows], "picks": [asdict(p) for p in picks()]})
    write_confirmation(task, LATENCY_MS)
    return task


def write_confirmation(task: Path, latency_ms: dict[str, float], paces=(1.0, 1.0, 1.0), disturbed: str = "") -> None:
    events = [
        Turn(build=build, group=0, round=turn, row=row, samples_ms=(ms * pace,) * 3, disturbed=disturbed)
        for build, pace in enumerate(paces)
        for turn in range(2)
        for row, ms in latency_ms.items()
    ]
    lost = Failed(stage="build", reason="unsupported operator", wall_s=1.0)
    events += [RowFailure(build=build, group=0, row="linear", failed=lost) for build in range(3)]
    header = json.dumps({"kind": "header", "plan": {"builds": 3, "rounds": 2}})
    write_records(task / "confirmation.jsonl", (header, *map(encode_turn_event, events)))


def picks() -> list[Choice]:
    found = {"method": "random", "kind": "search", "minutes": 0.5}
    return [
        Choice(method="float", kind="float", row="float"),
        Choice(method="float", kind="float", row="float-bf16"),
        Choice(method="all", kind="baseline", row="all"),
        Choice(method="linear", kind="baseline", row="linear"),
        Choice(method="ort_static", kind="baseline", row="", reason="it said\nthat " + "this will never work " * 9),
        Choice(**found, row="bb", seed=0, budget=2, search_ms=5.0),
        Choice(**found, row="aa", seed=0, budget=3, search_ms=4.0),
        Choice(**found, row="bb", seed=0, budget=3, search_ms=5.0, rank=1),
        Choice(**found, row="bb", seed=1, budget=2, search_ms=5.0),
        Choice(**found, row="bb", seed=1, budget=3, search_ms=5.0),
        Choice(method="tpe", kind="search", row="", seed=0, budget=3, reason="nothing measured"),
    ]


def write_journal(path: Path) -> None:
    good = {"build_s": 4.0, "measure_s": 4.0, "evaluate_s": 1.5}
    outcomes = (
        Measured(samples_ms=(8.0,) * 7, metrics={"top1": 0.8}, **good),
        Measured(samples_ms=(4.0,) * 7, metrics={"top1": 0.79}, **good),
        Failed(stage="build", reason="no", wall_s=9.5),
    )
    with Journal(path, {}) as journal:
        for number, outcome in enumerate(outcomes):
            journal.append(Proposal(number=number, choices=(number,), digest=str(number), origin="searcher"))
            journal.append(TrialResult(number=number, outcome=outcome, elapsed_s=10.0 * (number + 1)))


def write_models(models: Path) -> None:
    """Exported models for the rows that have Q/DQ pairs: everything, and the linear operators alone."""
    g = GraphBuilder("net")
    x = g.op("Relu", g.conv(g.input("x", (1, 3, 8, 8)), 4, 3))
    y = g.op("Add", g.conv(x, 4, 3), x)
    g.output(g.op("GlobalAveragePool", y, name="</script><script>document.title='owned'</script>"))
    model = load_proto(g.build(), source="net", sha256="0")
    write_model(model.proto, models / "float.onnx")
    space = build_space(model, OPENVINO)
    ranges = {edge.tensor: (-1.0, 1.0) for d in space.dimensions for edge in d.edges}
    inserter = Inserter(model, OPENVINO, ranges)
    for name, placement in (
        ("all", space.quantize_all()),
        ("aa", space.quantize_roles({"linear"})),
        ("bb", space.quantize_roles({"add"})),
    ):
        inserter.export(space.resolve(placement), models / f"{name}.onnx")


def write_folder(folder: Path) -> Path:
    """Write an experiment with one finished task."""
    only = EXPERIMENT.replace(", {use: other.onnx, label: other}", "")
    (folder / "experiment.yaml").write_text(to_yaml(parse_experiment(only, "small")))
    write_task(folder)
    return folder


def write_choices(folder: Path, task_name: str, fixed, choices, latency_ms, **changes) -> Path:
    """Write a task whose searchers chose these rows by searcher and budget, one per seed."""
    task = write_task(folder, task_name, **changes)
    shutil.rmtree(task / "runs")
    chosen = [Choice(method="float", kind="float", row="float")]
    chosen += [Choice(method=name, kind="baseline", row=row) for name, row in fixed.items()]
    chosen += [
        Choice(method=searcher, kind="search", row=row, seed=seed, budget=budget, search_ms=5.0)
        for (searcher, budget), rows in choices.items()
        for seed, row in enumerate(rows)
    ]
    edit_json(task / "rows.json", picks=[asdict(pick) for pick in chosen])
    write_confirmation(task, {TWIN: 8.0, "float": 8.0, **latency_ms})
    return task


def write_search(path: Path, *trials: tuple[str, Outcome], origin: str = "searcher", step_s: float = 60.0) -> None:
    """Write the journal of a search; the placement "float" is the float model."""
    with Journal(path, {}) as journal:
        for number, (digest, outcome) in enumerate(trials):
            choices = (0,) if digest == "float" else (number + 1,)
            journal.append(Proposal(number=number, choices=choices, digest=digest, origin=origin))
            journal.append(TrialResult(number=number, outcome=outcome, elapsed_s=step_s * (number + 1)))


def measured(latency_ms: float, **metrics: float) -> Measured:
    """Return an outcome with seven equal samples."""
    return Measured(samples_ms=(latency_ms,) * 7, build_s=1.0, measure_s=2.0, metrics=metrics)


def edit_json(path: Path, change=None, **facts) -> None:
    """Change a stored JSON object in place by a function, or set keys; None removes a key."""
    body = read_json(path) if path.exists() else {}
    if change is not None:
        change(body)
    body.update(facts)
    write_json(path, {key: value for key, value in body.items() if value is not None})


def seal_bundle(folder: Path, **facts) -> None:
    """Write the manifest of a folder to deploy as a stranger can; if facts are given, also its files but the model."""
    if facts:
        figures = {key: [1.0, 1.0, 1.0] for key in ("latency_ms", "speedup")}
        known = {"schema": 1, "file": "net.onnx", "answer": "", "experiment": {}, "runtime": {"name": "simulated"}}
        write_json(folder / "ship.json", {**known, **figures, **facts})
        for name in ("deploy.py", "report.md"):
            (folder / name).touch()
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    (folder / "SHA256SUMS").write_text("".join(f"{file_sha256(path)}  {path.name}\n" for path in files))


def edit_samples(task: Path, row: str, change) -> None:
    """Replace the samples of the turns of a row in the confirmation by `change(samples_ms, build)`."""
    lines = read_records(task / "confirmation.jsonl")
    for line in lines[1:]:
        if line["kind"] == "turn" and row in (line["row"], "*"):
            line["samples_ms"] = change(line["samples_ms"], line["build"])
    write_records(task / "confirmation.jsonl", lines)


def write_one_table(folder: Path, *names: str) -> None:
    """Write tables of the report of a folder, named in their order; it takes less time than all of them."""
    tables = build_tables(load(folder))
    for name in names:
        write_table(next(table for table in tables if table.name == name), folder / "report")


def read_table(folder: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of a written Markdown table by heading."""
    head, _, *lines = (folder / "report" / f"{name}.md").read_text().partition("\n\n")[0].splitlines()
    heads, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in (head, *lines))
    return [dict(zip(heads, row, strict=True)) for row in rows]


def read_note(folder: Path, name: str) -> str:
    """Return the note of a written Markdown table."""
    return (folder / "report" / f"{name}.md").read_text().partition("\n\n")[2]


def trace_lines(results: Results, address: str, table: str = "main") -> list[str]:
    """Return all lines of the trace of a cell."""
    return [line for source in trace_cell(results, address, table).sources for line in source.lines()]


def read_page_data(text: str) -> list[dict]:
    """Return the data of each task in a page."""
    packed = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    return [json.loads(gzip.decompress(base64.b64decode(task))) for task in packed]
