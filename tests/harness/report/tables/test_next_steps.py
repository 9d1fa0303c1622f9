"""Where no row may be shipped it is said why, and what may help."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from small import qdq

from harness.records import Failed
from harness.report.frames.main_frame import main_frame
from harness.report.load.results import load
from harness.report.tables.next_steps import describe_next_steps, describe_winners
from harness.results_dir.termination import write_termination
from harness.search_loop.objective import Goal
from harness.timing.turn_log import TWIN

pytestmark = pytest.mark.usefixtures("undrawn")
CELL = "net-openvino-int8"
STRICT = asdict(Goal(metric="top1", reference=0.8, max_drop=0.005))
SLOW_MS = {TWIN: 8.0, "float": 8.0, "float-bf16": 10.0, "all": 9.0, "aa": 12.0, "bb": 12.0}
Maker = Callable[..., Path]


def told(folder: Path) -> str:
    results = load(folder)
    return "\n".join(describe_next_steps(results, main_frame(results)))


def change(cell: Path, name: str, **facts: Any) -> None:
    path = cell / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def test_nothing_is_said_where_a_row_may_be_shipped(folder: Path) -> None:
    assert told(folder) == ""


def test_the_file_to_take_is_named_as_long_as_it_is_there(folder: Path) -> None:
    backend = json.loads((folder / CELL / "cell.json").read_text())["backend"]
    change(folder / CELL, "cell.json", backend={**backend, "float_params": {"bf16": {"precision": "bf16"}}})
    results = load(folder)
    main = main_frame(results)
    assert list(describe_winners(results, main)) == []
    best = main[main["best"].eq(True)].iloc[0]
    path = folder / CELL / "models" / results.cells[0].rows[best["row"]].file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    (line,) = describe_winners(results, main)
    floating = main[main["method"].eq("float") & main["precision"].eq("bf16")].index[0]
    main["best"] = main.index == floating
    main.loc[floating, "decision"] = "fastest, accuracy unknown"
    path.with_name(results.cells[0].rows[main.loc[floating, "row"]].file).touch()
    (bare,) = describe_winners(results, main)
    assert "precision bf16: deploy it so" in bare, "not that of the baseline"
    assert line.startswith(f"{CELL}: take {path} ({best['method']}, {best['speedup']:.2f}x, ")


def test_what_is_faster_and_breaks_the_bound_says_by_how_much_and_what_may_help(folder: Path) -> None:
    change(folder / CELL, "cell.json", goal=STRICT)
    assert told(folder).splitlines() == [
        f"No row of {CELL} may be shipped: what is faster loses more top-1 than the bound 0.005 (least: random, "
        "+0.0100). What may help:",
        "- a larger budget than 3 evaluations; what was measured is kept",
        "- another calibration.method than minmax, mse for instance",
        "- a looser bound: at 0.01 random could be shipped, 2.00x",
    ]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"calibration": {"method": "mse"}}, "- another calibration.method than mse, entropy for instance"),
        ({"calibrated_on": "random data"}, "- calibration data: the ranges are those of random data"),
    ],
)
def test_the_calibration_that_there_was_decides_what_to_try(
    folder: Path, facts: Mapping[str, Any], expected: str
) -> None:
    change(folder / CELL, "cell.json", goal=STRICT, **facts)
    assert expected in told(folder).splitlines()


def test_a_drop_whose_interval_reaches_within_the_bound_asks_for_more_images(folder: Path) -> None:
    change(folder / CELL, "cell.json", goal=STRICT)
    hits = {"sha of float": [1.0] * 80 + [0.0] * 20, "sha of aa": [0.0] + [1.0] * 79 + [0.0] * 20}
    scores = {f"{name} main": {"metrics": {"top1": sum(per) / 100}, "per_item": per} for name, per in hits.items()}
    change(folder / CELL, "accuracy.json", **scores)
    assert "- more images: by its interval that drop may be within the bound" in told(folder).splitlines()


def test_a_bound_that_nobody_wants_is_not_proposed(folder: Path) -> None:
    change(folder / CELL, "cell.json", goal=STRICT)
    change(folder / CELL, "accuracy.json", **{"sha of aa main": {"metrics": {"top1": 0.6}, "per_item": []}})
    assert "(least: all, +0.1000)" in told(folder)
    assert "looser" not in told(folder)


def test_where_nothing_is_faster_other_things_help(
    folder: Path, confirmation_maker: Callable[[Path, Mapping[str, float]], None]
) -> None:
    confirmation_maker(folder / CELL, SLOW_MS)
    rows = json.loads((folder / CELL / "rows.json").read_text())
    for row in rows["rows"]:
        row["choices"] = [1] if row["id"] == "all" else None
    change(folder / CELL, "rows.json", **rows)
    assert told(folder).splitlines() == [
        f"No row of {CELL} may be shipped: none is faster than the float model. What may help:",
        f"- qdq explain {folder} {CELL}/all: what its pairs cost and give on this runtime",
        "- a larger budget than 3 evaluations; what was measured is kept",
    ]
    device = json.loads((folder / CELL / "cell.json").read_text())["backend"]["device"]
    (folder / CELL / "env.json").write_text(json.dumps({"cpu": {"model": device, "flags": ["avx2"]}}))
    first = "- a processor with VNNI or AMX: this one has neither, and INT8 gains little there"
    assert told(folder).splitlines()[1] == first
    change(folder / CELL, "cell.json", goal=STRICT)
    ruled_out = "- a looser bound than 0.005: evaluations that were faster than float and broke it: 2"
    assert ruled_out in told(folder).splitlines(), "one in each of two searches"


def test_a_cell_that_is_not_finished_gets_no_advice(folder: Path) -> None:
    change(folder / CELL, "cell.json", goal=STRICT)
    (folder / CELL / "confirm.jsonl").unlink()
    assert told(folder) == ""


def test_it_stands_below_the_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder / CELL, "cell.json", goal=STRICT)
    assert qdq("report", str(folder)) == 0
    tables, _, advice = capsys.readouterr().out.partition("No row of ")
    assert "faster, beyond the bound" in tables
    assert advice.startswith(f"{CELL} may be shipped: ")


def test_a_search_with_nothing_more_to_propose_gains_nothing_by_a_larger_budget(folder: Path) -> None:
    change(folder / CELL, "cell.json", goal=STRICT)
    rows = json.loads((folder / CELL / "rows.json").read_text())
    for pick in rows["picks"]:
        pick["budget"] = 50 if pick["budget"] == 3 else pick["budget"]
    change(folder / CELL, "rows.json", **rows)
    said = told(folder)
    assert "a larger budget" not in said
    assert "- more budget.minutes: random-0, random-1" in said
    for seed in (0, 1):
        write_termination(
            folder / CELL / "runs" / f"random-{seed}.jsonl", "ended at 3 of 50: it had nothing more to propose", None
        )
    said = told(folder)
    assert "larger budget" not in said
    assert "another searcher" in said
    assert "random-0, random-1 had nothing more to propose" in said
    broken = Failed(stage="search", reason="no")
    for seed in (0, 1):
        write_termination(folder / CELL / "runs" / f"random-{seed}.jsonl", "ended at 3 of 50: no", broken)
    assert "- a searcher that does not break: random-0, random-1" in told(folder)
