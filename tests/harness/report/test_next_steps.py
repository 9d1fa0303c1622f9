"""Winner to deploy, or reasons and remedies if no row may be shipped."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from small_results import LATENCY_MS, TASK, edit_json, write_confirmation

from harness.base.files import read_json, write_json
from harness.measure.records import Failed
from harness.measure.turn_log import TWIN
from harness.report.frames import main_frame
from harness.report.next_steps import best_row, describe_answers, describe_next_steps, format_answer
from harness.report.page.index_page import render_index
from harness.report.tables.notes import early_end_notes
from harness.report.trace import find_main_row
from harness.results.folder import load
from harness.results.output_check import CHECK_FILE_NAME, OutputCheck, encode_check
from harness.results.search_log import Goal
from harness.results.termination import write_termination

STRICT = asdict(Goal(metric="top1", reference=0.8, max_drop=0.005))
SLOW_MS = {TWIN: 8.0, "float": 8.0, "float-bf16": 10.0, "all": 9.0, "aa": 12.0, "bb": 12.0}


def remedies(folder: Path) -> str:
    results = load(folder)
    return "\n".join(describe_next_steps(results, main_frame(results)))


@pytest.mark.parametrize(
    ("choices", "pairs", "axes", "chosen"),
    [
        ({"all": [1]}, {"all": 9}, {}, "random"),
        ({"all": [1]}, {"all": 2}, {}, "all"),
        ({"all": None}, {"all": 2}, {}, "random"),
        ({"all": None}, {"all": 2}, {"all": "all.dynamic.onnx"}, "all"),
        ({"all": [1]}, {"all": 2}, {"aa": "aa.dynamic.onnx"}, "random"),
    ],
)
def test_among_ties_the_row_that_keeps_more_is_the_answer(folder, choices, pairs, axes, chosen):
    """`all` is faster than `random` (row aa) by less than the noise."""
    edit_json(folder / TASK / "task.json", goal=asdict(Goal()))
    write_confirmation(folder / TASK, LATENCY_MS | {"all": 3.99, "aa": 4.0})
    rows = read_json(folder / TASK / "rows.json")
    for row in rows["rows"]:
        row["choices"], row["pairs"] = choices.get(row["id"], row["choices"]), pairs.get(row["id"], row["pairs"])
    edit_json(folder / TASK / "rows.json", **rows)
    edit_json(folder / TASK / "dynamic.json", **{row: {"file": name} for row, name in axes.items()})
    task = load(folder).tasks[0]
    row = best_row(task, main_frame(load(folder)))
    assert row["method"] == chosen
    assert ("tie with all" in row["decision"]) == (chosen == "random")


def test_ties_that_keep_the_same_end_with_the_fastest(folder):
    edit_json(folder / TASK / "task.json", goal=asdict(Goal()))
    write_confirmation(folder / TASK, LATENCY_MS | {"all": 3.99, "aa": 3.99})
    rows = read_json(folder / TASK / "rows.json")
    for row in rows["rows"]:
        row["choices"], row["pairs"] = [1], 5
    edit_json(folder / TASK / "rows.json", **rows)
    edit_json(folder / TASK / "accuracy.json", **{"sha of all main": {"metrics": {"top1": 0.79}, "per_item": []}})
    results = load(folder)
    for main in (main_frame(results), main_frame(results)[::-1]):
        assert best_row(results.tasks[0], main)["decision"] == "fastest, no bound on accuracy"


@pytest.mark.parametrize(
    ("bound", "score", "bf16_ms", "answer", "named"),
    [
        (0.01, 0.786, 10.0, "take .*2.00x .*random", "all, 4.00x"),
        (0.01, 0.784, 10.0, "take .*2.00x .*random", ""),
        (0.01, 0.79, 10.0, "take .*4.00x .*all", ""),
        (0.008, 0.79, 7.0, "take .*1.14x .*float", "all, 4.00x"),
        (0.008, 0.789, 10.0, "keep the float model .*least: random", "all, 4.00x"),
        (0.008, 0.795, 1.0, "take .*8.00x .*float", ""),
    ],
)
def test_a_faster_row_that_misses_the_bound_by_little_is_named(
    folder, monkeypatch, bound, score, bf16_ms, answer, named
):
    backend = read_json(folder / TASK / "task.json")["backend"]
    goal = asdict(Goal(metric="top1", reference=0.8, max_drop=bound))
    edit_json(folder / TASK / "task.json", goal=goal, backend={**backend, "float_open": True})
    scores = {"sha of all main": {"metrics": {"top1": score}, "per_item": []}}
    edit_json(folder / TASK / "accuracy.json", **scores)
    write_confirmation(folder / TASK, LATENCY_MS | {"bb": 12.0, "float-bf16": bf16_ms})
    results = load(folder)
    (folder / TASK / "models").mkdir()
    for row in results.tasks[0].rows.values():
        (folder / TASK / "models" / row.file).touch()
    monkeypatch.setattr("harness.report.next_steps.digest_file", lambda path: ANY)
    (line,) = describe_answers(results, main_frame(results))
    assert re.match(answer, line)
    found = re.search(r"; near miss: (\w+, [\d.]+x) .*loses top-1 .*more than the bound ([\d.]+)$", line)
    assert (found.groups() if found else ("", str(bound))) == (named, str(bound))


@pytest.mark.parametrize(("is_open", "bf16_ms"), [(False, 2.0), (False, 9.0), (True, 12.0)])
def test_the_answer_names_the_float_precision(folder, is_open, bf16_ms):
    """The baseline takes 8 ms at f32; every placement is slower."""
    backend = read_json(folder / TASK / "task.json")["backend"]
    edit_json(folder / TASK / "task.json", backend={**backend, "float_open": is_open})
    write_confirmation(folder / TASK, SLOW_MS | {"float-bf16": bf16_ms})
    (answer,) = describe_answers(results := load(folder), main_frame(results))
    assert answer.startswith("keep the float model at f32")
    assert ("BF16 alone: 4.00x" in answer and "you asked for f32" in answer) == (bf16_ms == 2.0)


def test_the_file_to_deploy_is_named_if_it_exists(folder, monkeypatch):
    recorded: dict[Path, str] = {}
    monkeypatch.setattr("harness.report.next_steps.digest_file", lambda path: recorded[path])
    backend = read_json(folder / TASK / "task.json")["backend"]
    edit_json(folder / TASK / "task.json", backend={**backend, "float_params": {"bf16": {"precision": "bf16"}}})
    results = load(folder)
    main = main_frame(results)
    assert list(describe_answers(results, main)) == []
    best = main[main["best"].eq(True)].iloc[0]
    path = folder / TASK / "models" / results.tasks[0].rows[best["row"]].file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    recorded[path] = results.tasks[0].rows[best["row"]].sha256
    (line,) = describe_answers(results, main)
    floating = main[main["method"].eq("float") & main["precision"].eq("bf16")].index[0]
    main["best"] = main.index == floating
    main.loc[floating, ["status", "decision"]] = ["shippable", "fastest, accuracy unknown"]
    row = results.tasks[0].rows[main.loc[floating, "row"]]
    path.with_name(row.file).touch()
    recorded[path.with_name(row.file)] = row.sha256
    (bare,) = describe_answers(results, main)
    assert "precision bf16" in bare, "not that of the baseline"
    speedup = f"{best['speedup']:.2f}x [{best['speedup_low']:.2f}, {best['speedup_high']:.2f}]"
    assert line.startswith(f"take {path}: {speedup}, loses 1.0 points of top-1 ({best['method']}, ")
    shipped = folder / f"ship/{TASK}/{TASK}.onnx"
    shipped.parent.mkdir(parents=True)
    shipped.touch()
    recorded[shipped] = row.sha256
    (line,) = describe_answers(results, main)
    assert line.startswith(f"take {shipped}: "), "the folder to deploy"
    hits = {"metrics": {"top1": 0.5}, "per_item": [1, 0] * 20}
    edit_json(
        folder / TASK / "accuracy.json",
        **{f"{results.tasks[0].rows['float'].sha256} main": hits, f"{row.sha256} main": hits},
    )
    results = load(folder)
    (line,) = describe_answers(results, main)
    assert "none of 40 samples lost its answer, which does not exclude a loss of up to 7.5 points" in line


@pytest.mark.parametrize(
    ("metric", "values", "lower", "expected"),
    [
        ("sqnr_db", {"score": 44.24, "drop": 75.76}, False, ", SQNR 44.2 dB ("),
        ("agreement", {"score": 0.99, "drop": 0.01}, False, ", loses 1.0 points of agreement ("),
        ("top1", {"score": 0.81, "drop": -0.004, "drop_low": -0.01, "drop_high": 0.0}, False,
         ", gains 0.4 points of top-1 [+0.0, +1.0] ("),
        ("perplexity", {"score": 5.5, "drop": 0.5}, True, ", perplexity +0.5000 ("),
        ("top1", {"score": None, "drop": None}, False, "4.00] (m, "),
    ],
)  # fmt: skip
def test_the_answer_states_the_accuracy(folder, metric, values, lower, expected):
    edit_json(folder / TASK / "task.json", metric=metric, higher_is_better=not lower)
    row = {"speedup": 4.0, "speedup_low": 4.0, "speedup_high": 4.0, "method": "m", "decision": "ship", **values}
    limits = {"metric": metric, "drop_low": None, "drop_high": None, "precision": "int8+f32"}
    assert expected in format_answer(load(folder).tasks[0], limits | row)


def test_the_answer_of_a_busy_machine_has_the_command_that_confirms_it(folder, monkeypatch):
    write_confirmation(folder / TASK, LATENCY_MS, disturbed="waited for a core 50% of the time")
    results = load(folder)
    rows = {f"{row.id}.onnx": row.sha256 for row in results.tasks[0].rows.values()}
    monkeypatch.setattr("harness.report.next_steps.digest_file", lambda path: rows[path.name])
    for name in rows:
        (folder / TASK / "models" / name).parent.mkdir(exist_ok=True)
        (folder / TASK / "models" / name).touch()
    (here,) = describe_answers(results, main_frame(results), Path.cwd())
    (there,) = describe_answers(results, main_frame(results), folder.parent)
    assert here.endswith(f": qdq verify {folder} {TASK}/random")
    assert there.endswith(f": qdq verify {folder} {TASK}/random --base {folder.parent}")
    assert f"{TASK}/random --base " in render_index(results, [], lambda task: None, base=folder.parent)
    of_program = replace(results, stored=replace(results.stored, from_program=True))
    (called,) = describe_answers(of_program, main_frame(results), Path.cwd())
    assert "qdq.autotune" in called
    assert "qdq verify" not in called
    main = main_frame(results)
    main["best"] = main["busy"] = main["row"].eq("float-bf16")
    main.loc[main["best"], ["status", "decision"]] = ["shippable", "fastest, accuracy unknown"]
    rows["float.onnx"] = results.tasks[0].rows["float-bf16"].sha256
    (line,) = describe_answers(results, main, Path.cwd())
    command = line.rpartition(": ")[2]
    assert command.startswith(f"qdq verify {folder} ")
    assert find_main_row(results, command.split()[-1])["row"] == "float-bf16"


def test_faster_rows_beyond_the_bound_have_remedies(folder):
    edit_json(folder / TASK / "task.json", goal=STRICT)
    results = load(folder)
    (answer,) = describe_answers(results, main_frame(results))
    assert answer.startswith("keep the float model at f32")
    assert "because the faster rows lose more top-1 than the bound 0.005" in answer
    assert remedies(folder).splitlines() == [
        f"No row of {TASK} may be shipped: the faster rows lose more top-1 than the bound 0.005 (least: random, "
        "2.00x, +0.0100, 0.005 too much). Remedies:",
        "- a larger budget than 3 evaluations; existing results are kept",
        "- another calibration.method than minmax, for instance mse",
        "- a looser bound, in a new results folder: at 0.01 random could be shipped, 2.00x",
    ]


def hits(right: int) -> dict[str, object]:
    return {"metrics": {"top1": right / 100}, "per_item": [1.0] * right + [0.0] * (100 - right)}


@pytest.mark.parametrize(
    ("file", "facts", "expected"),
    [
        ("task.json", {"calibration": {"method": "mse"}}, "- another calibration.method than mse"),
        ("task.json", {"calibrated_on": "random data"}, "- calibration data: "),
        ("accuracy.json", {"sha of float main": hits(80), "sha of aa main": hits(79)}, "- more images: "),
        ("runs", {}, "- a search, "),
    ],
)
def test_a_loss_beyond_the_bound_has_remedies_by_its_cause(folder, file, facts, expected):
    edit_json(folder / TASK / "task.json", goal=STRICT)
    assert expected not in remedies(folder)
    if facts:
        edit_json(folder / TASK / file, **facts)
    else:
        shutil.rmtree(folder / TASK / file)
    assert expected in remedies(folder)


def test_rows_that_are_not_faster_have_other_remedies(folder):
    write_confirmation(folder / TASK, SLOW_MS)
    rows = read_json(folder / TASK / "rows.json")
    for row in rows["rows"]:
        row["choices"] = [1] if row["id"] == "all" else None
    edit_json(folder / TASK / "rows.json", **rows)
    assert remedies(folder).splitlines() == [
        f"No row of {TASK} may be shipped: none of its rows is faster than the float model. Remedies:",
        f"- qdq explain {folder} {TASK}/all: cost and gain of its Q/DQ pairs on this runtime",
        "- a larger budget than 3 evaluations; existing results are kept",
    ]
    device = read_json(folder / TASK / "task.json")["backend"]["device"]
    write_json(folder / TASK / "env.json", {"cpu": {"model": device, "flags": ["avx2"]}})
    first = "- a processor with VNNI or AMX: this one has neither, and INT8 gains little on it"
    assert remedies(folder).splitlines()[1] == first
    edit_json(folder / TASK / "task.json", goal=STRICT)
    ruled_out = "- a looser bound than 0.005: 2 evaluations faster than float lost "
    assert ruled_out in remedies(folder), "one in each of two searches"
    assert "none of its rows within the bound is faster" in remedies(folder)


def test_a_tie_within_the_bound_is_named_beside_faster_rows_beyond_it(folder):
    write_confirmation(folder / TASK, {**LATENCY_MS, "aa": 7.999, "bb": 12.0}, paces=(1.0, 1.1, 0.9))
    said = remedies(folder)
    assert "the fastest row within the bound, random, is a tie with the float model at 1.00x" in said
    assert f"- qdq explain {folder} {TASK}/random" in said


@pytest.mark.parametrize(
    ("verdict", "operator", "version", "remedy"),
    [
        ("wrong result", "soft (Softmax)", "1.24.4", "- onnxruntime 1.32.0, without this known fault: "),
        ("wrong result", "soft (Softmax)", "1.32.0", ""),
        ("wrong result", "tanh (Tanh)", "1.24.4", ""),
        ("saturates", "", "1.24.4", "- weights of 7 bits (reduce_range: true), or a processor with VNNI"),
    ],
)
def test_wrong_results_of_the_runtime_are_the_reason(folder, verdict, operator, version, remedy):
    backend = {**read_json(folder / TASK / "task.json")["backend"], "name": "onnxruntime", "version": version}
    edit_json(folder / TASK / "task.json", backend=backend)
    rows = load(folder).tasks[0].rows
    check = encode_check(OutputCheck(verdict=verdict, operator=operator, model="models/fault.onnx", reason="differs"))
    write_json(folder / TASK / CHECK_FILE_NAME, {"checks": {rows[name].key: check for name in ("all", "aa", "bb")}})
    said = remedies(folder)
    assert "the results of onnxruntime contradict the files of all (all), random (bb), random (aa)" in said
    assert f"- a bug report on the runtime: {folder / TASK / 'models/fault.onnx'} reproduces it" in said
    assert remedy in said
    assert ("onnxruntime 1.32.0" in said) == ("1.32.0" in remedy)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("limits", "needed"),
    [
        ("task_minutes: 3", "budget.task_minutes, .*: about 5 instead of 3"),
        ("minutes: 0.5", "budget.minutes: about 1 instead of 0.5"),
    ],
)
def test_a_time_limit_that_ended_a_search_is_named_with_its_remedy(folder, limits, needed, strict):
    experiment = folder / "experiment.yaml"
    experiment.write_text(re.sub(rf"\b{limits.partition(':')[0]}: null", limits, experiment.read_text()))
    if strict:
        edit_json(folder / TASK / "task.json", goal=STRICT)
    rows = read_json(folder / TASK / "rows.json")
    for pick in rows["picks"]:
        pick["budget"] = 6 if pick["budget"] == 3 else pick["budget"]
    edit_json(folder / TASK / "rows.json", **rows)
    write_json(folder / TASK / "phases.json", {"set-up": 30.0, "search": 60.0, "confirmation": 60.0})
    said = remedies(folder)
    assert re.search(needed, said), said
    assert "random-0 made 3, random-1 made 3 of 6 evaluations" in said
    assert any(f"ended at 3 of 6: the time limit (budget.{limits})" in note for note in early_end_notes(load(folder)))


def test_a_search_that_ended_by_itself_needs_no_larger_budget(folder):
    edit_json(folder / TASK / "task.json", goal=STRICT)
    rows = read_json(folder / TASK / "rows.json")
    for pick in rows["picks"]:
        pick["budget"] = 50 if pick["budget"] == 3 else pick["budget"]
    edit_json(folder / TASK / "rows.json", **rows)
    said = remedies(folder)
    assert "a larger budget" not in said
    assert "- more time (budget.minutes or " in said
    for seed in (0, 1):
        write_termination(
            folder / TASK / "runs" / f"random-{seed}.jsonl", "ended at 3 of 50: it had nothing more to propose", None
        )
    said = remedies(folder)
    assert "larger budget" not in said
    assert "another searcher" in said
    assert "random-0 ended at 3 of 50: it had nothing more to propose; random-1 ended" in said
    broken = Failed(stage="search", reason="no")
    for seed in (0, 1):
        write_termination(folder / TASK / "runs" / f"random-{seed}.jsonl", "ended at 3 of 50: no", broken)
    assert "- another searcher: random-0, random-1 failed" in remedies(folder)
