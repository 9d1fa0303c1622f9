"""Replays of searchers on a table: the evaluations of a search, and what `qdq bench replay` reports."""

from __future__ import annotations

import itertools
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
from harness.replay.replay_report import check_table, estimate_drift, measure_difficulty, replay_all, table_lines
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
    scored = outcomes_of(lambda a, b: None if a and b else 4.0 - a, sqnr_db=lambda a, b: 30.0 - 20 * a)
    without = outcomes_of(lambda a, b: 4.0)

    def outcome(choices: tuple[int, ...]) -> Outcome:
        return scored(choices) if any(choices[:2]) else without(choices)

    landscape = Landscape(make_table(dimensions=2, outcome=outcome), ("sqnr_db", 20.0))
    searcher = Listed([(1, 1), (1, 0), (0, 1), (0, 0)])
    path = replay_once(landscape, searcher, budget=10, seed=0)
    assert path == [3, 2, 1, 0]
    searches = Searches(landscape, {0: np.array(path, dtype=np.int32)}, 5)
    assert searches.readings_ms.tolist() == [[math.inf, math.inf, 4.0, math.inf, math.inf]]
    assert searches.latency_ms.tolist() == searches.found_ms.tolist() == [[4.0] * 5], "the slowest that is allowed"
    assert (landscape.optimum, landscape.allowed.sum(), searches.evaluations) == (1, 1, [4])
    failed, bad, good, unknown = (observation.outcome for observation in searcher.observed)
    assert failed == Failure(stage="crash", reason="the worker died")
    assert bad.violation == pytest.approx(10.0)
    assert good.violation == 0
    assert unknown.reason == "no sqnr_db was recorded"


def test_infinite_metric_counts_as_failure_under_bound(make_table):
    infinite = outcomes_of(lambda a, b: 1.0, sqnr_db=lambda a, b: -math.inf if a and b else 20.0)
    landscape = Landscape(make_table(dimensions=2, outcome=infinite), ("sqnr_db", -1000.0))
    assert landscape.allowed.tolist() == [True, True, True, False]
    assert landscape.scores[3].reason == "no sqnr_db was recorded"


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
        (["--at-least", "sqnr_db"], "METRIC=VALUE"),
        (["--at-least", "sqnr_db=much"], "METRIC=VALUE"),
        (["--at-least", "sqnr_db=nan"], "METRIC=VALUE"),
        (["--initial", "linaer"], "did you mean 'linear'?"),
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
    table = make_table(dimensions=2, outcome=outcomes_of(lambda a, b: 1.0 if a or b else 100.0))
    _, (many, _), _ = replay_all(table, ["random"], seeds=20, budget=1)
    assert many[1].startswith("0.00 [0.00, ")
    _, (_, one), _ = replay_all(table, ["random"], seeds=1, budget=1)
    assert one[1] in ("0.00", "9900.00"), "a single search has no quartiles"


def measured(latency_ms: float, **metrics: float) -> Measured:
    return Measured(samples_ms=(latency_ms,) * 7, build_s=0.1, measure_s=0.1, metrics=metrics)


def test_optimum_and_anchors(make_table):
    landscape = Landscape(make_table())
    best = list(landscape.table.subspace.placements())[landscape.optimum]
    assert best.choices == (1, 1, 1, 0, 1, 0)  # the second helps only with the first
    assert landscape.latency_ms[landscape.optimum] == pytest.approx(
        10 * math.exp(-0.4 + 0.3 - 0.4 - 0.2 - 0.05), rel=1e-6
    )
    assert landscape.anchors_ms["float"] == pytest.approx(10.0, rel=1e-6)
    assert set(landscape.anchors_ms) == {"float", "all"}
    assert [landscape.index(p) for p in landscape.table.subspace.placements()] == list(range(64))


def test_variance_decomposition_is_exact(make_table):
    """Of a pair product, half the effect falls to each single dimension and a quarter of it to the pair."""
    difficulty = measure_difficulty(Landscape(make_table()))
    single = np.array([-0.4 - 0.2, 0.3 - 0.2, -0.2, 0.1, -0.05, 0.02]) / 2
    pair = 0.4 / 4
    total = float((single**2).sum() + pair**2)
    assert difficulty["additive"] == pytest.approx((single**2).sum() / total, rel=1e-4)
    assert difficulty["pairwise"] == pytest.approx(pair**2 / total, rel=1e-3)
    assert difficulty["additive"] + difficulty["pairwise"] == pytest.approx(1)


def test_difficulty_separates_smooth_from_random_landscape(make_table):
    rng = np.random.default_rng(1)

    def rough(choices: tuple[int, ...]) -> Outcome:
        return measured(float(np.exp(rng.standard_normal())))

    easy, hard = measure_difficulty(Landscape(make_table())), measure_difficulty(Landscape(make_table(outcome=rough)))
    assert easy["fitness_distance"] > 0.5 > hard["fitness_distance"]
    assert easy["neighbour_correlation"] > 0.5 > hard["neighbour_correlation"]
    assert easy["local_optima"] == pytest.approx(1 / 64)
    assert hard["local_optima"] > 4 / 64
    assert easy["additive"] > 0.9 > hard["additive"]
    assert easy["near_optimum"] == pytest.approx(1 / 64)
    assert easy["random_evaluations"] == pytest.approx(65 / 2)


def test_difficulty_of_flat_table(make_table):
    difficulty = measure_difficulty(Landscape(make_table(outcome=lambda _: measured(3.0))))
    assert difficulty["near_optimum"] == difficulty["local_optima"] == difficulty["additive"] == 1.0
    assert difficulty["random_evaluations"] == 1.0
    assert difficulty["fitness_distance"] == difficulty["neighbour_correlation"] == difficulty["pairwise"] == 0.0


def test_bounds_that_no_placement_reaches_are_refused(make_table):
    table = make_table()
    with pytest.raises(UserError, match="no metric 'sqnr' was recorded; did you mean 'sqnr_db'"):
        Landscape(table, ("sqnr", 1.0))
    with pytest.raises(UserError, match="no placement reaches the bound"):
        Landscape(table, ("sqnr_db", 1000.0))
    nothing = make_table(outcome=lambda _: Failed(stage="build", reason="unsupported"))
    with pytest.raises(UserError, match="no placement could be measured"):
        Landscape(nothing)


def test_replayed_readings_are_recorded_samples(make_table):
    landscape = Landscape(make_table(noise=0.1))
    rng = np.random.default_rng(0)
    seen = [landscape.observe(5, rng).objective for _ in range(300)]  # type: ignore[union-attr]
    assert set(seen) <= set(landscape.outcomes[5].samples_ms)  # type: ignore[union-attr]
    assert len(set(seen)) > 3
    assert np.median(seen) == pytest.approx(landscape.latency_ms[5])


def test_drift_is_estimated_despite_random_order(make_table):
    # The placement outside of the subspace comes first.
    order = [1, *(i for i in np.random.default_rng(4).permutation(65).tolist() if i != 1)]
    turn = itertools.count()

    def drifting(choices: tuple[int, ...]) -> Outcome:
        return measured(math.exp(-0.4 * choices[0] + 0.1 * next(turn) / 64))

    def shuffled(rows: dict) -> dict:  # type: ignore[type-arg]
        items = [list(rows.items())[i] for i in order]
        turned = [(digest, row, drifting(row.choices)) for digest, row in items]
        return {d: type(r)(number=i, choices=r.choices, outcome=o) for i, (d, r, o) in enumerate(turned)}

    slope, stderr = estimate_drift(Landscape(make_table(anchors={}, rows=shuffled)))
    assert slope == pytest.approx(0.1, abs=3 * stderr)
    assert 0 < stderr < 0.03
    slope, stderr = estimate_drift(Landscape(make_table(noise=0.05)))
    assert abs(slope) < 3 * stderr
