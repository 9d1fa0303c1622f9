"""Reports of a small results folder, written by the harness's own encoders and never timed."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import matplotlib.image
import pandas as pd
import pytest

from harness.errors import UserError
from harness.measure.confirm import TWIN, Block, Dropped, encode_event
from harness.records import Asked, Failed, Measured, Told
from harness.report import render
from harness.report.tables import Table, markdown, write_table
from harness.run.config import parse_experiment, to_yaml
from harness.run.engine import Goal
from harness.run.journal import Journal
from harness.run.rows import Pick, Row, write_json

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
CELL = "net-openvino-int8"
FACTS = {
    "schema": 1,
    "cell": CELL,
    "model": "net",
    "calibrated_on": "8 samples",
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


def write_cell(folder: Path, facts=FACTS) -> Path:
    """A finished cell: two seeds of random, a tpe that found nothing, and a baseline that does not build."""
    cell = folder / CELL
    (cell / "runs").mkdir(parents=True)
    write_json(cell / "cell.json", facts)
    write_scores(cell, "top1")
    for seed in (0, 1):
        write_journal(cell / "runs" / f"random-{seed}.jsonl")
    ids = {"float": 0, "float-bf16": 0, "all": 9, "linear": 4, "aa": 5, "bb": 3}
    rows = [Row(id=name, file=f"{name}.onnx", sha256=f"sha of {name}", pairs=pairs) for name, pairs in ids.items()]
    write_json(cell / "rows.json", {"rows": [asdict(r) for r in rows], "picks": [asdict(p) for p in picks()]})
    events = [
        Block(build=build, group=0, round=turn, row=row, samples_ms=(ms, ms, ms))
        for build in range(3)
        for turn in range(2)
        for row, ms in LATENCY_MS.items()
    ]
    lost = Failed(stage="build", reason="unsupported operator", wall_s=1.0)
    events += [Dropped(build=build, group=0, row="linear", failed=lost) for build in range(3)]
    write_lines(cell / "confirm.jsonl", [json.dumps({"kind": "header"}), *map(encode_event, events)])
    return cell


def write_scores(cell: Path, metric: str) -> None:
    scores = {f"sha of {row} main": {"metrics": {metric: v}, "per_item": []} for row, v in SCORES.items()}
    write_json(cell / "accuracy.json", scores)


def picks() -> list[Pick]:
    found = {"method": "random", "kind": "search", "minutes": 0.5}
    return [
        Pick(method="float", kind="float", row="float"),
        Pick(method="float", kind="float", row="float-bf16"),
        Pick(method="all", kind="baseline", row="all"),
        Pick(method="linear", kind="baseline", row="linear"),
        Pick(method="ort_static", kind="baseline", row="", reason="it said\nthat " + "this will never work " * 9),
        Pick(**found, row="bb", seed=0, budget=2, search_ms=5.0),
        Pick(**found, row="aa", seed=0, budget=3, search_ms=4.0),
        Pick(**found, row="bb", seed=0, budget=3, search_ms=5.0, rank=1),
        Pick(**found, row="bb", seed=1, budget=2, search_ms=5.0),
        Pick(**found, row="bb", seed=1, budget=3, search_ms=5.0),
        Pick(method="tpe", kind="search", row="", seed=0, budget=3, reason="nothing measured"),
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
            journal.append(Asked(number=number, choices=(number,), digest=str(number), origin="searcher"))
            journal.append(Told(number=number, outcome=outcome, elapsed_s=10.0 * (number + 1)))


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def folder(tmp_path):
    only = EXPERIMENT.replace(", {use: other.onnx, label: other}", "")
    (tmp_path / "experiment.yaml").write_text(to_yaml(parse_experiment(only, "small")))
    write_cell(tmp_path)
    return tmp_path


def cells_of(path: Path) -> list[list[str]]:
    """Cells of a Markdown table without its padding."""
    table = path.read_text().partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in (table[0], *table[2:])]


MAIN = """
model | device | precision | method | latency ms [CI] | speedup [CI] | mAP or top-1 | drop | Q/DQ pairs | builds ok | minutes | verdict
net | A CPU, 2 threads | f32 | float | 8.000 [8.000, 8.000] | 1.00 [1.00, 1.00] | top-1 0.8000 | +0.0000 | 0 | 3/3 | - | baseline
net | A CPU, 2 threads | bf16 | float | 10.000 [10.000, 10.000] | 0.80 [0.80, 0.80] | top-1 0.8000 | +0.0000 | 0 | 3/3 | - | slower
net | A CPU, 2 threads | int8+f32 | all | 2.000 [2.000, 2.000] | 4.00 [4.00, 4.00] | top-1 0.7000 | +0.1000 | 9 | 3/3 | - | faster
net | A CPU, 2 threads | int8+f32 | linear | - | - | - | - | 4 | 0/3 | - | failed: build
net | A CPU, 2 threads | int8+f32 | ort_static | - | - | - | - | - | 0/0 | - | it said that this will never work this will never work ...
net | A CPU, 2 threads | int8+f32 | random | **4.000 [4.000, 4.000]** | **2.00 [2.00, 2.00]** | top-1 0.7900 | +0.0100 | 5 | 2/3 | 0.5 | faster
net | A CPU, 2 threads | int8+f32 | tpe | - | - | - | - | - | 0/0 | - | nothing measured
"""  # noqa: E501
FINALISTS = """
cell | method | latency ms [CI] | speedup [CI] | mAP or top-1 | drop | Q/DQ pairs | verdict | seed | placement
net-openvino-int8 | random | 4.000 [4.000, 4.000] | 2.00 [2.00, 2.00] | top-1 0.7900 | +0.0100 | 5 | faster | 0 | aa
net-openvino-int8 | random #2 | 5.000 [5.000, 5.000] | 1.60 [1.60, 1.60] | top-1 0.8000 | +0.0000 | 3 | faster | 0 | bb
net-openvino-int8 | random | 5.000 [5.000, 5.000] | 1.60 [1.60, 1.60] | top-1 0.8000 | +0.0000 | 3 | faster | 1 | bb
net-openvino-int8 | tpe | - | - | - | - | - | nothing measured | 0 | -
"""
BUDGET = """
cell | searcher | 2 evaluations | 3 evaluations | seeds
net-openvino-int8 | random | 1.60 [1.60, 1.60] | 1.80 [1.60, 2.00] | 2
"""
COST = """
cell | searches | evaluations | minutes | build | sampling | evaluation | failures | harness
net-openvino-int8 | 2 | 6 | 1.0 | 26.7% | 26.7% | 10.0% | 31.7% | 5.0%
"""


@pytest.mark.parametrize(
    ("name", "golden"), [("main", MAIN), ("finalists", FINALISTS), ("budget", BUDGET), ("cost", COST)]
)
def test_table_is_exactly_this(folder, name, golden):
    render(folder)
    assert cells_of(folder / "report" / f"{name}.md") == [line.split(" | ") for line in golden.strip().splitlines()]


def test_the_text_shows_main_budget_and_cost_and_the_files_hold_the_finalists_too(folder):
    text = render(folder)
    assert "| verdict" in text
    assert "3 evaluations" in text
    assert "harness" in text
    assert "random #2" not in text
    assert "UNFINISHED" not in text
    names = {path.name for path in (folder / "report").iterdir()}
    assert names == {
        *(f"{name}.{kind}" for name in ("main", "finalists", "budget", "cost") for kind in ("md", "csv", "tex")),
        f"anytime-{CELL}.png",
        f"anytime-minutes-{CELL}.png",
    }


def test_csv_holds_raw_figures_and_whole_reasons(folder):
    render(folder)
    raw = pd.read_csv(folder / "report" / "main.csv")
    assert raw.loc[raw["method"] == "linear", "reason"].item() == "unsupported operator"
    assert raw.loc[raw["method"] == "ort_static", "reason"].item().count("never") == 9
    assert raw["speedup"].dropna().tolist() == pytest.approx([1.0, 0.8, 4.0, 2.0])
    assert raw.loc[raw["best"], "method"].tolist() == ["random"]
    assert "*" not in (folder / "report" / "main.csv").read_text()


def test_latex_has_the_best_in_bold_and_no_raw_special_letters(folder):
    render(folder)
    text = (folder / "report" / "main.tex").read_text()
    assert r"\textbf{2.00 [2.00, 2.00]}" in text
    assert r"ort\_static" in text


@pytest.mark.parametrize(
    ("measured", "precisions", "expected"),
    [
        (False, {"f32": {}, "bf16": {}}, "over the float model at f32 (pinned), paired"),
        (False, {"f32": {}}, "over the float model at f32, paired"),
        (True, {"f32": {}, "bf16": {}}, "at f32, the fastest float precision by measurement, paired"),
    ],
)  # fmt: skip
def test_note_says_what_the_speedup_is_over(folder, measured, precisions, expected):
    backend = {**FACTS["backend"], "float_params": precisions}
    write_json(folder / CELL / "cell.json", {**FACTS, "backend": backend})
    if measured:
        write_json(folder / CELL / "float.json", {"strongest": "f32"})
    text = render(folder)
    assert expected in text
    assert "3 fresh builds" in text
    assert "Student's over builds" in text
    assert "whose drop is at most 0.02" in text


def test_drop_is_positive_where_a_lower_figure_is_better_and_rises(folder):
    goal = asdict(Goal())
    write_json(folder / CELL / "cell.json", {**FACTS, "higher_is_better": False, "goal": goal})
    render(folder)
    raw = pd.read_csv(folder / "report" / "main.csv")
    assert raw.loc[raw["method"] == "all", "drop"].item() == pytest.approx(-0.1)
    assert raw.loc[raw["best"], "method"].tolist() == ["all"], "no bound: the fastest of all"


def test_results_without_the_field_take_the_direction_of_the_goal(folder):
    old = {key: value for key, value in FACTS.items() if key != "higher_is_better"}
    write_json(folder / CELL / "cell.json", {**old, "goal": {**FACTS["goal"], "higher_is_better": False}})
    render(folder)
    raw = pd.read_csv(folder / "report" / "main.csv")
    assert raw.loc[raw["method"] == "all", "drop"].item() == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("metric", "shown"), [("map", "mAP 0.7000"), ("sqnr_db", "SQNR 0.7 dB"), ("my_own", "my_own 0.7000")]
)
def test_metrics_are_shown_by_their_usual_name(folder, metric, shown):
    write_json(folder / CELL / "cell.json", {**FACTS, "metric": metric, "goal": asdict(Goal())})
    write_scores(folder / CELL, metric)
    assert shown in render(folder)


def test_cells_that_have_not_begun_are_unfinished(folder):
    (folder / "experiment.yaml").write_text(to_yaml(parse_experiment(EXPERIMENT, "small")))
    assert "UNFINISHED: other-openvino-int8; run the same command again" in render(folder)


@pytest.mark.parametrize("gone", [("rows.json", "confirm.jsonl"), ("confirm.jsonl",), ("accuracy.json",), ("runs",)])
def test_a_run_cut_short_renders(folder, gone):
    for name in gone:
        path = folder / CELL / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = render(folder)
    assert ("UNFINISHED" in text) == ("confirm.jsonl" in gone)
    assert ("No search has ended yet." in text) == ("rows.json" in gone)
    if "confirm.jsonl" in gone:
        assert "**" not in text, "nothing is best before it is confirmed"


@pytest.mark.parametrize("keep", [0, 3, 40, 250, 700])
def test_torn_lines_render(folder, keep):
    for path in (folder / CELL / "confirm.jsonl", folder / CELL / "runs" / "random-0.jsonl"):
        path.write_bytes(path.read_bytes()[:keep])
    assert f"UNFINISHED: {CELL}" in render(folder)


def test_an_experiment_that_has_not_begun_says_so(folder):
    shutil.rmtree(folder / CELL)
    assert render(folder).startswith("No cell has begun yet.\n\nUNFINISHED: net-openvino-int8")


@pytest.mark.parametrize("name", ["cell.json", "rows.json", "accuracy.json"])
def test_a_damaged_file_is_named(folder, name):
    (folder / CELL / name).write_text("{")
    with pytest.raises(UserError, match=rf"{name}: (damaged|cannot be read) \(.*\); move"):
        render(folder)


def test_a_folder_of_something_else_names_the_remedy(tmp_path):
    with pytest.raises(UserError, match=r"no results here .*qdq run"):
        render(tmp_path / "nowhere")


def test_another_schema_is_refused(folder):
    write_json(folder / CELL / "cell.json", {**FACTS, "schema": 7})
    with pytest.raises(UserError, match="written with schema 7, this version reads schema 1"):
        render(folder)


def test_a_hostile_name_is_only_text(tmp_path):
    name = "a_b%<script>|x\n*y* [z](u) \\input{p} `c` \x1b[31m"
    cells = pd.DataFrame([{"model": name, "n": "1"}, {"model": "[q]", "n": "2"}])
    table = Table(name="t", cells=cells, raw=cells, note=f"of {name}")
    assert r"a_b%\<script>\|x \*y\* [z\](u) \\input{p} \`c\`  [31m" in markdown(table)
    write_table(table, tmp_path)
    tex = (tmp_path / "t.tex").read_text()
    assert r"a\_b\%\textless{}script\textgreater{}\textbar{}x" in tex
    assert r"\textbackslash{}input\{p\}" in tex
    assert "{}[q] & 2" in tex
    assert all(line.startswith(("%", "\\", "a", "{}")) for line in tex.splitlines() if " & " not in line)


def test_curves_fill_their_picture_to_the_margin_and_no_further(folder):
    render(folder)
    for path in (folder / "report").glob("*.png"):
        picture = matplotlib.image.imread(path)[..., :3]
        border = [picture[:3], picture[-3:], picture[:, :3], picture[:, -3:]]
        assert all((edge == 1.0).all() for edge in border), f"{path.name}: text runs over the edge"
