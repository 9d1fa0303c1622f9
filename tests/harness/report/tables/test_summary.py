"""Summary that a run ends with."""

from pathlib import Path

from harness.report.frames import main_frame
from harness.report.tables.main import summary_table
from harness.results.folder import load

RESULTS = Path(__file__).parents[4] / "results"


def summarize(name: str):
    results = load(RESULTS / name)
    return summary_table(results, main_frame(results))


def test_summary_of_one_task_has_at_most_eight_rows():
    table = summarize("quickstart")
    assert table.cells.shape == (8, 5)
    assert list(table.cells["method"])[:3] == ["float", "float bf16", "linear"]
    assert {"random_mutation", "auto", "tpe", "evolutionary", "modelopt_ptq"} <= set(table.cells["method"])
    assert dict(zip(table.cells["method"], table.cells["verdict"], strict=True))["modelopt_ptq"] == "beyond the bound"
    assert "2 more rows" in table.note
    assert "qdq report" in table.note
    best = [table.cells["method"][row] for (row, _), mark in table.marks.items() if mark == "best"]
    assert "auto" in best
    assert "modelopt_ptq" not in best


def test_several_tasks_have_their_fastest_row_each():
    table = summarize("held_out")
    fastest = [*["auto"] * 5, "float", "auto", "modelopt"]
    assert list(table.cells["method"]) == fastest, "float where no row may be shipped"
    assert "task" in table.cells
    assert table.cells.shape[1] == 6
