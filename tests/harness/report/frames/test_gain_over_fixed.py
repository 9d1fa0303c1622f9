"""What a search adds to the best fixed row of its cell."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

import harness.report
from harness.report.load.results import load
from harness.report.page.index_page import render_index
from harness.report.render import write_tables
from harness.report.tables.table_layouts import build_tables
from harness.report.trace import trace_cell
from harness.results_dir.io import write_json
from harness.search_loop.objective import Goal

CELL = "net-openvino-int8"
OTHER = "other-openvino-int8"
YAML = """
experiment: small
models: [{use: net.onnx, label: net}, {use: other.onnx, label: other}]
backends: [{use: openvino}]
searchers: [auto, tpe]
baselines: [all, movers]
budget: {evaluations: [10, 25, 50]}
seeds: [0]
"""
FIXED = {"all": "all", "movers": "bb"}
FREE = asdict(Goal())


@pytest.fixture(autouse=True)
def experiment(tmp_path):
    (tmp_path / "experiment.yaml").write_text(YAML)


def lines_of(folder):
    return harness.report.load(folder).fixed.set_index(["searcher", "budget"])


def text_of(folder) -> str:
    return (folder / "report" / "fixed.md").read_text()


def rows_of(folder) -> list[dict[str, str]]:
    write_tables(load(folder), folder / "report")
    head, _, *lines = text_of(folder).partition("\n\n")[0].splitlines()
    names, *cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines))
    return [dict(zip(names, line, strict=True)) for line in cells]


def shown(folder) -> dict[str, dict[str, str]]:
    return {row["searcher"]: row for row in rows_of(folder)}


def test_each_choice_is_judged_beside_the_fastest_fixed_row(tmp_path, choices_maker):
    choices = {("auto", 10): ["all"], ("auto", 25): ["bb"], ("auto", 50): ["aa"], ("tpe", 50): ["cc"]}
    latency_ms = {"all": 5.0, "bb": 4.0, "aa": 2.0, "cc": 4.02}
    cell = choices_maker(CELL, FIXED, choices, latency_ms, goal=FREE)
    found = lines_of(tmp_path)
    assert set(found["fixed"]) == {"movers"}
    assert found["ratio"].to_dict() == pytest.approx(
        {("auto", 10): 0.8, ("auto", 25): 1.0, ("auto", 50): 2.0, ("tpe", 50): 4 / 4.02}
    )
    assert found["verdict"].tolist() == ["slower", "the same placement", "faster", "tie"]
    lines = shown(tmp_path)
    assert lines["auto"] == {
        "cell": CELL, "best fixed row": "movers", "A/A floor": "0.0%", "searcher": "auto",
        "10 evaluations": "0.80 [0.80, 0.80] slower", "25 evaluations": "the same placement",
        "50 evaluations": "2.00 [2.00, 2.00] faster", "seeds": "1",
    }  # fmt: skip
    assert lines["tpe"]["10 evaluations"] == "-"
    write_json(cell / "floor.json", {"floor": 0.3})
    assert lines_of(tmp_path)["verdict"].tolist() == ["tie", "the same placement", "faster", "tie"]


def test_seeds_have_a_median_and_the_widest_limits(tmp_path, choices_maker):
    choices_maker(CELL, FIXED, {("auto", 10): ["aa", "bb"]}, {"all": 5.0, "bb": 4.0, "aa": 2.0}, goal=FREE)
    (line,) = lines_of(tmp_path).to_dict("records")
    assert (line["ratio"], line["low"], line["high"]) == pytest.approx((1.5, 1.0, 2.0))
    assert (line["verdict"], line["seeds"], line["same"]) == ("tie", 2, 1)


def test_readings_that_went_up_and_down_together_are_paired(tmp_path, choices_maker, confirmation_maker):
    cell = choices_maker(CELL, FIXED, {("auto", 10): ["aa"]}, {}, goal=FREE)
    latency_ms = {"A/A twin": 8.0, "float": 8.0, "all": 5.0, "bb": 4.0, "aa": 2.0}
    confirmation_maker(cell, latency_ms, paces=(1.0, 2.0, 3.0))
    assert shown(tmp_path)["auto"]["10 evaluations"] == "2.00 [2.00, 2.00] faster"


def test_a_single_turn_is_no_verdict(tmp_path, choices_maker):
    cell = choices_maker(CELL, FIXED, {("auto", 10): ["aa"]}, {"all": 5.0, "bb": 4.0, "aa": 2.0}, goal=FREE)
    path = cell / "confirm.jsonl"
    header, *events = path.read_text().splitlines()
    first = [line for line in events if json.loads(line).get("round") == 0 == json.loads(line)["build"]]
    path.write_text("".join(f"{line}\n" for line in (header, *first)))
    assert shown(tmp_path)["auto"]["10 evaluations"] == "2.00 tie"


def test_a_fixed_row_beyond_the_bound_is_not_the_best_and_a_choice_beyond_it_is_told(tmp_path, choices_maker):
    choices = {("auto", 10): ["aa", "all"]}
    latency_ms = {"all": 2.0, "bb": 4.0, "aa": 4.0}
    choices_maker(CELL, FIXED, choices, latency_ms)
    line = shown(tmp_path)["auto"]
    assert line["best fixed row"] == "movers", "the drop of all is beyond the bound"
    assert line["10 evaluations"].endswith(", 1/2 not to ship")
    choices_maker(OTHER, {"all": "all"}, choices, latency_ms, model="other")
    assert harness.report.load(tmp_path).fixed.set_index("cell").loc[OTHER, "row"] == ""
    assert shown(tmp_path)["auto"]["best fixed row"] == "none to ship"
    assert shown(tmp_path)["auto"]["10 evaluations"] == "-"


@pytest.mark.parametrize(
    ("fixed", "choices"),
    [({}, {("auto", 10): ["aa"]}), ({"from_one": "bb"}, {("auto", 10): ["aa"]}), (FIXED, {})],
)
def test_without_fixed_rows_or_searchers_there_is_no_table(tmp_path, choices_maker, fixed, choices):
    choices_maker(CELL, fixed, choices, {"all": 5.0, "bb": 4.0, "aa": 2.0}, goal=FREE)
    assert lines_of(tmp_path).empty, "what was brought over from another cell is no fixed row"
    assert "fixed" not in {table.name for table in build_tables(load(tmp_path))}


def test_two_baselines_of_one_placement_are_named_together(tmp_path, choices_maker):
    choices_maker(CELL, {"all": "bb", "movers": "bb"}, {("auto", 10): ["aa"]}, {"bb": 4.0, "aa": 2.0}, goal=FREE)
    assert shown(tmp_path)["auto"]["best fixed row"] == "all, movers"


def test_below_it_stand_what_it_favours_and_the_tally_of_each_searcher(tmp_path, choices_maker):
    latency_ms = {"all": 5.0, "bb": 4.0, "aa": 2.0}
    choices = {("auto", 25): ["aa"], ("auto", 50): ["aa"]}
    choices_maker(CELL, FIXED, choices, latency_ms, goal=FREE)
    write_tables(load(tmp_path), tmp_path / "report")
    assert "the comparison favours it" in text_of(tmp_path)
    assert "auto: after" not in text_of(tmp_path), "one cell needs no tally"
    choices_maker(OTHER, FIXED, {("auto", 25): ["all"], ("auto", 50): ["bb"]}, latency_ms, model="other", goal=FREE)
    write_tables(load(tmp_path), tmp_path / "report")
    assert (
        "auto: after 25 evaluations 1 faster, 1 slower, least 0.80; after 50 evaluations 1 faster, 1 the same "
        "placement, least 1.00."
    ) in text_of(tmp_path)


def test_the_tally_names_ties_whose_figure_is_slower_by_more_than_the_floor(tmp_path, choices_maker):
    latency_ms = {"all": 5.0, "bb": 4.0, "aa": 2.0}
    choices_maker(CELL, FIXED, {("auto", 25): ["all", "all", "bb"]}, latency_ms, goal=FREE)
    other = choices_maker(OTHER, FIXED, {("auto", 25): ["all", "bb", "all"]}, latency_ms, model="other", goal=FREE)
    write_json(other / "floor.json", {"floor": 0.26})
    write_tables(load(tmp_path), tmp_path / "report")
    said = f"auto: after 25 evaluations 2 tie, least 0.80 (ties by their brackets alone: {CELL} 0.80)."
    assert said in text_of(tmp_path)


def test_the_tally_names_ties_that_the_floor_alone_makes(tmp_path, choices_maker):
    latency_ms = {"all": 5.0, "bb": 4.0, "aa": 3.9}
    for cell, model in ((CELL, "net"), (OTHER, "other")):
        written = choices_maker(cell, FIXED, {("auto", 25): ["aa"]}, latency_ms, model=model, goal=FREE)
    write_json(written / "floor.json", {"floor": 0.05})
    write_tables(load(tmp_path), tmp_path / "report")
    said = f"auto: after 25 evaluations 1 faster, 1 tie, least 1.03 (ties by the floor alone: {OTHER} 1.03)."
    assert said in text_of(tmp_path)


def test_over_several_cells_stands_their_geometric_mean_with_an_interval_from_three_on(tmp_path, choices_maker):
    third = "third-openvino-int8"
    (tmp_path / "experiment.yaml").write_text(
        YAML.replace("label: other}", "label: other}, {use: t.onnx, label: third}")
    )
    latency_ms = {"all": 5.0, "bb": 4.0, "aa": 2.0}
    choices_maker(CELL, FIXED, {("auto", 10): ["aa"]}, latency_ms, goal=FREE)
    choices_maker(OTHER, FIXED, {("auto", 10): ["bb"]}, latency_ms, model="other", goal=FREE)
    found = [row["10 evaluations"] for row in rows_of(tmp_path) if row["cell"] == "geometric mean"]
    assert found == ["1.41 of 2"], "two cells say nothing of others"
    choices_maker(third, FIXED, {("auto", 10): ["all"]}, latency_ms, model="third", goal=FREE)
    mean = next(row for row in rows_of(tmp_path) if row["cell"] == "geometric mean")
    assert (mean["best fixed row"], mean["A/A floor"], mean["searcher"]) == ("-", "-", "auto")
    assert mean["10 evaluations"].startswith("1.17 [0.3")
    assert mean["10 evaluations"].endswith("] of 3"), "no verdict without a floor"
    frame = harness.report.load(tmp_path).fixed
    assert frame[frame["cell"].isna()]["ratio"].tolist() == pytest.approx([(2.0 * 1.0 * 0.8) ** (1 / 3)])
    sources = trace_cell(load(tmp_path), "geometric mean/auto:10", "fixed").lines
    assert f"{third}, auto, seed 0 at 10 evaluations: all" in sources


def test_it_is_on_the_page_in_every_markup_and_can_be_traced(tmp_path, choices_maker):
    cell = choices_maker(CELL, FIXED, {("auto", 10): ["aa"]}, {"all": 5.0, "bb": 4.0, "aa": 2.0}, goal=FREE)
    write_json(cell / "floor.json", {"floor": 0.337})
    results = load(tmp_path)
    tables = write_tables(results, tmp_path / "report")
    assert "What a search adds to the best fixed row" in render_index(results, tables, {})
    assert all((tmp_path / "report" / f"fixed.{kind}").exists() for kind in ("md", "csv", "tex"))
    assert text_of(tmp_path).partition("\n\n")[2].startswith(f"Noisy machine, {CELL}: the A/A floor is 33.7%")
    lines = trace_cell(results, "auto:10 evaluations", "fixed").lines
    assert f"{CELL}, auto, seed 0 at 10 evaluations: aa" in lines
    assert f"{CELL}, the best fixed row: bb" in lines
    assert sum(line.startswith("geometric mean of the median ratios") for line in lines) == 2
