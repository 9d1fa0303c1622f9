"""Replays of searchers on a table: the evaluations of a search, and what `qdq bench replay` reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_up_tables import outcomes_of
from small import qdq

from harness.base.errors import UserError
from harness.config.sections import ModelSpec, PluginSpec
from harness.graph.builder import GraphBuilder
from harness.measure.records import Failed, Measured, Outcome
from harness.replay.record_table import EnumeratingSearcher
from harness.replay.replay import Landscape, ReplayRequest, replay, replay_once
from harness.replay.replay_report import check_table, replay_all, table_lines
from harness.replay.simulated_selection import Searches
from search.api import Failure, Observation, Placement, Score


class Listed(EnumeratingSearcher):
    """Searcher that asks for given placements and stores its observations."""

    def __init__(self, placements: Sequence[tuple[int, ...]]) -> None:
        super().__init__(map(Placement, placements))
        self.observed: list[Observation] = []

    def tell(self, observation: Observation) -> None:
        self.observed.append(observation)


def run(landscape: Landscape, use: str, seeds: Sequence[int], budget: int, **more: Any) -> Searches:
    initial = more.pop("initial", ())
    searcher = PluginSpec(use=use, **more)
    table = landscape.table.path
    request = ReplayRequest(searcher=searcher, table=table, seeds=seeds, budget=budget, initial=initial)
    return Searches(landscape, replay(landscape, request), budget)


@pytest.mark.parametrize("name", ["random", "random_mutation", "evolutionary", "local"])
def test_searchers_reach_optimum_and_are_reproducible(name, make_table):
    landscape = Landscape(make_table(noise=0.01))
    one, two = (run(landscape, name, range(3), 64, initial=("float",)) for _ in range(2))
    np.testing.assert_array_equal(one.latency_ms, two.latency_ms)
    assert one.latency_ms[:, -1] == pytest.approx(landscape.latency_ms.min(), rel=0.03)
    assert one.latency_ms[:, 0] == pytest.approx(10.0, rel=0.02)  # the float model is the first evaluation
    assert one.elapsed_s[:, -1] == pytest.approx(0.6 * one.evaluations, rel=1e-3)


def test_duplicate_placement_is_free_with_same_reading(make_table):
    landscape = Landscape(make_table(dimensions=2, noise=0.1))
    searcher = Listed([(0, 0), (0, 0), (1, 0), (0, 0), (1, 1)])
    assert replay_once(landscape, searcher, budget=3, seed=0) == [0, 2, 3]
    assert len(searcher.observed) == 5
    assert searcher.observed[0] == searcher.observed[1] == searcher.observed[3]
    assert searcher.observed[0].digest == landscape.table.subspace.space.digest(Placement((0, 0)))


def test_failed_and_infeasible_placements_are_no_incumbents(make_table):
    table = make_table(
        dimensions=2, outcome=outcomes_of(lambda a, b: None if a and b else 4.0 - a, sqnr_db=lambda a, b: 30.0 - 20 * a)
    )
    landscape = Landscape(table, ("sqnr_db", 20.0))
    searcher = Listed([(1, 1), (1, 0), (0, 1)])
    path = replay_once(landscape, searcher, budget=10, seed=0)
    assert path == [3, 2, 1]
    readings_ms = Searches(landscape, {0: np.array(path, dtype=np.int32)}, 3).readings_ms
    assert readings_ms.tolist() == [[math.inf, math.inf, 4.0]]
    failed, bad, good = (observation.outcome for observation in searcher.observed)
    assert failed == Failure(stage="crash", reason="the worker died")
    assert isinstance(bad, Score)
    assert bad.violation == pytest.approx(10.0)
    assert isinstance(good, Score)
    assert good.violation == 0


def test_searcher_with_nothing_left_keeps_its_incumbent(make_table):
    found = run(Landscape(make_table(dimensions=2)), "random", [0], 50)
    assert found.evaluations == [4]
    assert found.latency_ms.shape == (1, 50)
    assert (found.latency_ms[0, 4:] == found.latency_ms[0, 3]).all()


def test_readings_are_reproducible_from_evaluated_placements(make_table):
    """So a study stores no readings: they would be nine tenths of its file."""

    def outcome(choices: tuple[int, ...]) -> Outcome:
        if choices[0] and choices[1]:
            return Failed(stage="crash", reason="the worker died", wall_s=3.0)
        samples = np.random.default_rng(list(choices)).uniform(1.0, 2.0, 9)
        return Measured(samples_ms=tuple(samples), build_s=1.0, measure_s=0.5)

    landscape = Landscape(make_table(outcome=outcome))
    for seed in range(5):
        placements = list(landscape.table.subspace.placements())
        searcher = Listed([placements[i].choices for i in np.random.default_rng(seed).permutation(len(placements))])
        path = replay_once(landscape, searcher, budget=30, seed=seed)
        observed = [
            each.outcome.objective if isinstance(each.outcome, Score) else math.inf for each in searcher.observed
        ]
        assert Searches(landscape, {seed: np.array(path, dtype=np.int32)}, 30).readings_ms.tolist() == [observed]
        assert math.inf in observed


BROKEN = """
class Broken:
    def __init__(self, space, *, seed):
        pass

    def ask(self, n):
        return [][n]

    def tell(self, observation):
        pass
"""


@pytest.mark.parametrize(
    ("use", "more", "message"),
    [
        ("mine_that_breaks:Broken", {}, r"(?s)searcher 'Broken', seed 7, failed; IndexError: .*return \[\]\[n\]"),
        ("randon", {}, "no searcher is called 'randon'; did you mean 'random'"),
        ("random", {"params": {"sede": 1}}, "has no parameter 'sede'"),
        ("random", {"initial": ["modelopt_ptq"]}, "'modelopt_ptq' is no placement of a replay; known: all, float, lin"),
        ("random", {"budget": 0}, "seeds of at least 1, but got 0"),
    ],
)
def test_replay_that_fails_names_the_cause(make_table, tmp_path, monkeypatch, use, more, message):
    (tmp_path / "mine_that_breaks.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=message):
        run(Landscape(make_table(dimensions=2)), use, [7], **{"budget": 5, **more})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--at-least", "sqnr_db"], "--at-least sqnr_db: METRIC=VALUE, for instance sqnr_db=20"),
        (["--at-least", "sqnr_db=much"], "--at-least sqnr_db=much: METRIC=VALUE"),
        (["--at-least", "sqnr_db=nan"], "--at-least sqnr_db=nan: METRIC=VALUE"),
        (["--initial", "linaer"], "initial: 'linaer' is no placement of a replay; did you mean 'linear'?"),
        (["--initial", "linaer", "--searcher", "random"], "did you mean 'linear'?"),
    ],
)
def test_invalid_options_are_refused_with_remedy(make_table, capsys, options, message):
    assert qdq("bench", "replay", str(make_table(dimensions=2).path), *options) == 2
    assert message in capsys.readouterr().err


def test_table_of_another_model_is_refused(make_table, tmp_path):
    builder = GraphBuilder("net")
    builder.output(builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 1))
    builder.save(tmp_path / "net.onnx")
    with pytest.raises(UserError, match=r"another model: it was recorded of made-up\.onnx \(000000000000\), but .*net"):
        check_table(make_table(dimensions=2), ModelSpec(use=str(tmp_path / "net.onnx")), tmp_path)


def test_replay_command_prints_and_writes_results(make_table, tmp_path, capsys):
    table, out = make_table(noise=0.01), tmp_path / "out"
    order = ["--searcher", "random", "--searcher", "local", "--seeds", "4", "--budget", "12", "--out", str(out)]
    assert qdq("bench", "replay", str(table.path), *order) == 0
    printed = capsys.readouterr().out
    assert "made-up (made-up.onnx, 000000000000) on openvino 1, a CPU, floats in f32" in printed
    assert "64 placements of 6 of 8 dimensions" in printed
    assert "random, 10000 searches\t" in printed
    assert "initial placements, with" not in printed
    assert "local: 48 evaluations in" in printed
    curves = pd.read_csv(out / "curves.csv")
    assert list(curves.columns) == ["searcher", "seed", "evaluations", "latency_ms", "regret"]
    assert curves.groupby("searcher").size().to_dict() == {"local": 48, "random": 48, "random, 10000 searches": 12}
    assert curves.groupby("searcher")["seed"].max().to_dict() == {"local": 3, "random": 3, "random, 10000 searches": -1}
    assert (curves["regret"] >= 0).all()
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_lines_of_a_table_and_its_initial_placements_show_known_values(make_table):
    """The dimensions that a table fixes stay fixed: initial placements are not the anchors of the whole space."""
    table = make_table()
    lines = table_lines(table)
    assert "optimum 4.724 ms (float 10.000 ms" in lines[2]
    assert "1.56 % within 1 % of the optimum (random search needs 32 evaluations on average)" in lines[3]
    landscape, space = Landscape(table), table.subspace.space
    both = [landscape.latency_ms[landscape.index(p)] for p in (space.float_placement(), space.quantize_all())]
    *_, notes = replay_all(table, ["random"], seeds=1, budget=5, initial=("float", "all"))
    listed = f"float {both[0]:.3f} ms, all {both[1]:.3f} ms"
    assert f"initial placements, with the dimensions that the table fixes: {listed}" in notes


@pytest.mark.parametrize(
    ("initial", "gain", "named"),
    [
        (("float", "all"), 0.1, "'all'"),
        (("float", "all"), 0.001, "'all'"),
        (("float",), 0.001, "'float'"),
        (("float",), 0.1, None),
        ((), 0.1, None),
    ],
)
def test_table_with_optimum_among_initial_placements_warns(make_table, initial, gain, named):
    table = make_table(dimensions=2, outcome=outcomes_of(lambda a, b: 4.0 - gain * (a + b)))
    *_, notes = replay_all(table, ["random"], seeds=1, budget=4, initial=initial)
    found = [note for note in notes if "all searchers are equal" in note]
    assert len(found) == (named is not None)
    assert named is None or f"the initial placement {named} is within 1 % of the optimum" in found[0]


def test_skewed_results_show_median_and_quartiles(make_table):
    table = make_table(dimensions=2, outcome=outcomes_of(lambda a, b: 100.0 if not (a or b) else 1.0))
    _, (random, searched), _ = replay_all(table, ["random"], seeds=20, budget=1)
    assert random[1].startswith("0.00 [0.00, ")
    assert searched[0] == "random"
    _, rows, _ = replay_all(table, ["random"], seeds=1, budget=1)
    assert rows[1][1] in ("0.00", "9900.00"), "a single search has no quartiles"
