"""Searchers on a table: as the engine would run them, and as chance would have it for random search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.base.errors import UserError
from harness.cli.main import main
from harness.config.sections import ModelSpec, PluginSpec
from harness.graph.builder import GraphBuilder
from harness.measure.records import Failed, Measured, Outcome
from harness.plugins import registry
from harness.replay.recorded_landscape import Landscape, MetricBound
from harness.replay.replay import check_table, read_paths, replay, replay_once
from harness.replay.replay_report import ReplayRequest, replay_all, table_lines
from search.api import Failure, Observation, Placement, Score


class Listed:
    """Asks for given placements and remembers what it is told."""

    def __init__(self, placements: Sequence[tuple[int, ...]]) -> None:
        self.left = [Placement(choices) for choices in placements]
        self.told: list[Observation] = []

    def ask(self, n: int) -> Sequence[Placement]:
        taken, self.left = self.left[:n], self.left[n:]
        return taken

    def tell(self, observation: Observation) -> None:
        self.told.append(observation)


def read(landscape: Landscape, walk: list[int], seed: int) -> list[float]:
    """What a search read on its walk."""
    readings_ms: list[float] = (
        read_paths(landscape, {seed: np.array(walk, dtype=np.int32)}, len(walk)).readings_ms[0].tolist()
    )
    return readings_ms


@pytest.mark.parametrize("name", ["random", "random_mutation", "evolutionary", "local"])
def test_searchers_reach_optimum_and_are_reproducible(name, make_table):
    landscape = Landscape(make_table(noise=0.01))
    one, two = (
        replay(landscape, PluginSpec(use=name), seeds=range(3), budget=64, initial=("float",)) for _ in range(2)
    )
    np.testing.assert_array_equal(one.latency_ms, two.latency_ms)
    assert one.latency_ms[:, -1] == pytest.approx(landscape.latency_ms.min(), rel=0.03)
    assert one.latency_ms[:, 0] == pytest.approx(10.0, rel=0.02)  # float, told first
    assert one.build_s == pytest.approx(0.6 * one.evaluations, rel=1e-3)


def test_duplicate_placement_is_free_with_same_reading(make_table):
    landscape = Landscape(make_table(dimensions=2, noise=0.1))
    searcher = Listed([(0, 0), (0, 0), (1, 0), (0, 0), (1, 1)])
    walk = replay_once(landscape, searcher, budget=3, seed=0)
    assert walk == [0, 2, 3]
    assert len(searcher.told) == 5
    assert searcher.told[0] == searcher.told[1] == searcher.told[3]
    assert searcher.told[0].digest == landscape.table.subspace.space.digest(Placement((0, 0)))


def test_failed_and_infeasible_placements_are_no_incumbents(make_table):
    def outcome(choices: tuple[int, ...]) -> Outcome:
        if choices[0] and choices[1]:
            return Failed(stage="crash", reason="the worker died", wall_s=3.0)
        return Measured(
            samples_ms=(4.0 - choices[0],) * 7, build_s=1.0, measure_s=0.5, metrics={"sqnr_db": 30.0 - 20 * choices[0]}
        )

    landscape = Landscape(make_table(dimensions=2, outcome=outcome), MetricBound(metric="sqnr_db", at_least=20.0))
    searcher = Listed([(1, 1), (1, 0), (0, 1)])
    walk = replay_once(landscape, searcher, budget=10, seed=0)
    assert walk == [3, 2, 1]
    assert read(landscape, walk, seed=0) == [math.inf, math.inf, 4.0]
    failed, bad, good = (observation.outcome for observation in searcher.told)
    assert failed == Failure(stage="crash", reason="the worker died")
    assert isinstance(bad, Score)
    assert bad.violation == pytest.approx(10.0)
    assert isinstance(good, Score)
    assert good.violation == 0


def test_a_searcher_with_nothing_left_keeps_its_incumbent(make_table):
    found = replay(Landscape(make_table(dimensions=2)), PluginSpec(use="random"), seeds=[0], budget=50)
    assert found.evaluations == 4
    assert found.latency_ms.shape == (1, 50)
    assert (found.latency_ms[0, 4:] == found.latency_ms[0, 3]).all()


BROKEN = """
class Broken:
    def __init__(self, space, *, seed):
        pass

    def ask(self, n):
        return [][n]

    def tell(self, observation):
        pass
"""


def test_failed_searcher_is_named_with_traceback(make_table, tmp_path, monkeypatch):
    (tmp_path / "mine_that_breaks.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = r"(?s)searcher 'Broken', seed 7, failed; IndexError: list index out of range\n.*return \[\]\[n\]"
    with pytest.raises(UserError, match=said):
        replay(Landscape(make_table(dimensions=2)), PluginSpec(use="mine_that_breaks:Broken"), seeds=[7], budget=5)


def test_invalid_replay_arguments_are_refused_with_remedy(make_table, tmp_path):
    table = make_table(dimensions=2)
    landscape = Landscape(table)
    with pytest.raises(UserError, match="no searcher is called 'randon'; did you mean 'random'"):
        replay(landscape, PluginSpec(use="randon"), seeds=[0], budget=1)
    with pytest.raises(UserError, match="has no parameter 'sede'"):
        replay(landscape, PluginSpec(use="random", params={"sede": 1}), seeds=[0], budget=1)
    with pytest.raises(UserError, match="initial: 'modelopt_ptq' is no placement of a replay; known: all, float, lin"):
        replay(landscape, PluginSpec(use="random"), seeds=[0], budget=1, initial=["modelopt_ptq"])
    with pytest.raises(UserError, match="seeds of at least 1, but got 0"):
        replay(landscape, PluginSpec(use="random"), seeds=[0], budget=0)
    for text in ("sqnr_db", "sqnr_db=much", "sqnr_db=nan"):
        with pytest.raises(UserError, match=f"--at-least {text}: METRIC=VALUE, for instance sqnr_db=20"):
            replay_all(table, ["random"], ReplayRequest(seeds=1, at_least=text), None)


def test_a_table_of_another_model_is_refused(make_table, tmp_path):
    builder = GraphBuilder("net")
    builder.output(builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 1))
    builder.save(tmp_path / "net.onnx")
    with pytest.raises(
        UserError, match=r"of another model: it was recorded of made-up\.onnx \(000000000000\), but .*net"
    ):
        check_table(make_table(dimensions=2), ModelSpec(use=str(tmp_path / "net.onnx")), tmp_path)


def test_replay_command_prints_and_writes_results(make_table, tmp_path, capsys):
    table = make_table(noise=0.01)
    order = ["--searcher", "random", "--searcher", "local", "--seeds", "4", "--budget", "12"]
    main(["replay", str(table.path), *order, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "made-up (made-up.onnx, 000000000000) on openvino 1, a CPU, floats in f32" in printed
    assert "64 placements of 6 of 8 dimensions" in printed
    assert "random, 10000 searches\t" in printed
    assert "median over searches [quartiles]" in printed
    assert "a simulated final selection makes among its best readings" in printed
    assert "tells no searcher" not in printed
    assert "initial placements, with" not in printed
    assert "local: 48 evaluations in" in printed
    curves = pd.read_csv(tmp_path / "out" / "curves.csv")
    assert list(curves.columns) == ["searcher", "seed", "evaluations", "latency_ms", "regret"]
    assert curves.groupby("searcher").size().to_dict() == {"local": 48, "random": 48, "random, 10000 searches": 12}
    assert (curves["regret"] >= 0).all()
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_initial_placements_have_latency_of_table(make_table):
    """Within the table: what it fixes stays fixed, so they are others than the anchors of the whole space."""
    table = make_table()
    notes = replay_all(table, ["random"], ReplayRequest(seeds=1, budget=5, initial=("float", "all")), None)[2]
    landscape = Landscape(table)
    space = table.subspace.space
    both = [landscape.latency_ms[landscape.index(p)] for p in (space.float_placement(), space.quantize_all())]
    assert (
        f"initial placements, with the dimensions that the table fixes: float {both[0]:.3f} ms, all {both[1]:.3f} ms"
        in notes
    )


def test_result_lines_show_known_values(make_table):
    lines = table_lines(make_table())
    assert "optimum 4.724 ms (float 10.000 ms" in lines[2]
    assert "1.56 % within 1 % of the optimum (random search needs 32 evaluations on average)" in lines[3]


@pytest.mark.parametrize("searcher", [(), ("--searcher", "random")])
def test_unknown_initial_placement_is_refused(searcher, make_table, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(make_table(dimensions=2).path), "--initial", "linaer", *searcher])
    assert ended.value.code == 2
    assert "initial: 'linaer' is no placement of a replay; did you mean 'linear'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("initial", "gain", "said"),
    [
        (("float", "all"), 0.1, "all searchers are equal on made-up: the initial placement 'all' is"),
        (("float", "all"), 0.001, "the initial placement 'all' is within 1 % of the optimum; start without any"),
        (("float",), 0.001, "the initial placement 'float' is within 1 % of the optimum"),
        (("float",), 0.1, None),
        ((), 0.1, None),
    ],
)
def test_table_with_optimum_among_initial_placements_warns(make_table, initial, gain, said):
    def outcome(choices: tuple[int, ...]) -> Outcome:
        return Measured(samples_ms=(4.0 - gain * sum(choices[:2]),) * 7, build_s=1.0, measure_s=0.5)

    table = make_table(dimensions=2, outcome=outcome)
    *_, notes = replay_all(table, ["random"], ReplayRequest(seeds=1, budget=4, initial=initial), None)
    found = [note for note in notes if "all searchers are equal" in note]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_skewed_results_show_median_and_quartiles(make_table):
    def outcome(choices: tuple[int, ...]) -> Outcome:
        return Measured(samples_ms=(1.0 + 99.0 * (not any(choices[:2])),) * 7, build_s=1.0, measure_s=0.5)

    order = ReplayRequest(seeds=20, budget=1)
    _, rows, _ = replay_all(make_table(dimensions=2, outcome=outcome), ["random"], order, None)
    random, searched = rows
    assert random[1].startswith("0.00 [0.00, ")
    assert searched[0] == "random"
    assert "+-" not in searched[1]
    _, rows, _ = replay_all(
        make_table(dimensions=2, outcome=outcome), ["random"], ReplayRequest(seeds=1, budget=1), None
    )
    assert rows[1][1] in ("0.00", "9900.00"), "a single search has no quartiles"


def test_readings_are_reproducible_from_evaluated_placements(make_table):
    """So a study keeps no readings: they would be nine tenths of its file."""

    def outcome(choices: tuple[int, ...]) -> Outcome:
        if choices[0] and choices[1]:
            return Failed(stage="crash", reason="the worker died", wall_s=3.0)
        samples = np.random.default_rng(list(choices)).uniform(1.0, 2.0, 9)
        return Measured(samples_ms=tuple(samples), build_s=1.0, measure_s=0.5)

    landscape = Landscape(make_table(outcome=outcome))
    for seed in range(5):
        space = landscape.table.subspace.space
        made = registry.check_params("searcher", "local", {}, supplied=("space", "seed"))(space, seed=seed)
        told: dict[int, float] = {}
        tell = made.tell

        def watched(observation: Observation, tell: Any = tell, told: dict[int, float] = told) -> None:
            outcome, index = observation.outcome, landscape.index(observation.placement)
            told.setdefault(index, outcome.objective if isinstance(outcome, Score) else math.inf)
            tell(observation)

        made.tell = watched
        walk = replay_once(landscape, made, budget=30, seed=seed)
        again = read(landscape, walk, seed)
        assert again == [told[index] for index in walk]
        assert math.inf in again
