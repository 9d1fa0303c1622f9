"""Objectives as they are written, and outcomes as they are ranked: bounds, fronts, accuracy first, the proxy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from harness.base.errors import UserError
from harness.base.statistics import Interval
from harness.config.experiment import parse_experiment
from harness.config.sections import Objective, absolute_bound, check_objective
from harness.measure.records import Failed, Measured, Proposal, TrialResult
from harness.plugins.api import Accuracy
from harness.results.journal import JournalEntry
from harness.results.search_log import (
    PREDICTED_METRIC,
    PROXY,
    Goal,
    encode_goal,
    is_feasible,
    score_outcome,
    state_at_budgets,
)
from harness.run.search.trial import (
    AccuracyGate,
    IncumbentState,
    ScoredPlacement,
    incumbent_state,
    loss_lower_bound,
)
from harness.workers.engines import FIRST_STAGE_EVALUATOR
from search.api import Score


def objective(text: str) -> Objective:
    return parse_experiment(f"experiment: e\nmodels: [zoo:resnet18]\nobjective: {{{text}}}", "e.yaml").objective


def test_metric_drop_key_sets_bound_and_metric():
    assert objective("map_drop: 0.01") == Objective(max_drop=0.01, metric="map")
    assert objective("max_drop: 0.01") == Objective(max_drop=0.01)
    assert not objective("").uses_accuracy


@pytest.mark.parametrize(("text", "bound"), [("max_drop: 1%", 0.004), ("top1_drop: 2.5 %", 0.01), ("max_drop: 0", 0.0)])
def test_a_bound_is_absolute_or_a_share_of_the_float_models_figure(text, bound):
    given = objective(text).max_drop
    assert given is not None
    assert absolute_bound(given, -0.4) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("map_drop: 0.01, top1_drop: 0.01", "one bound on one metric, but got map_drop, top1_drop"),
        ("max_drop: 0.01, map_drop: 0.01", "one bound on one metric, but got max_drop, map_drop"),
        ("max_drop: -0.1", "a number from 0, or a percentage of the float model's such as '1%', but got -0.1"),
        ("max_drop: little", "a number from 0, or a percentage of the float model's such as '1%', but got 'little'"),
        ("max_drop: .nan", "a number from 0"),
        ("max_drop: true", "a number from 0"),
        ("minimize: accuracy", "'minimize: accuracy' and 'max_latency'"),
        ("max_latency: 5", "'minimize: accuracy' and 'max_latency'"),
        ("minimize: loss", "objective.minimize: Input should be 'latency', 'pareto' or 'accuracy', but got 'loss'"),
        ("max_dropp: 0.01", "objective.max_dropp: unknown key; did you mean 'max_drop'"),
        ("halves: 1", "objective.halves: Input should be a valid boolean"),
        ("proxy: -1", "objective.proxy: Input should be greater than or equal to 0"),
    ],
)
def test_invalid_objectives_are_rejected(text, expected):
    with pytest.raises(UserError) as caught:
        objective(text)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "metric", "expected"),
    [
        ("max_drop: 0.01", None, "objective.max_drop: model 'net' has no evaluator whose metric could drop"),
        ("map_drop: 0.01", None, "objective.map_drop: model 'net' has no evaluator"),
        ("minimize: pareto", None, "objective.minimize: pareto: model 'net' has no evaluator"),
        ("halves: true", None, "objective.halves: model 'net' has no evaluator whose data could be halved"),
        ("map_drop: 0.01", "top1", "objective.map_drop: the evaluator of model 'net' gives 'top1'; write top1_drop"),
    ],
)
def test_an_objective_needs_its_metric(text, metric, expected):
    with pytest.raises(UserError) as caught:
        check_objective(objective(text), metric, "net")
    assert expected in str(caught.value)


def outcome(latency_ms: float, **metrics: float) -> Measured:
    return Measured(samples_ms=(latency_ms,) * 3, build_s=0.1, measure_s=0.1, metrics=metrics)


def score(goal: Goal, latency_ms: float, **metrics: float) -> Score:
    found = score_outcome(outcome(latency_ms, **metrics), goal)
    assert isinstance(found, Score)
    return found


def test_encoding_of_latency_goal_is_unchanged():
    assert encode_goal(Goal()) == {"metric": None, "reference": 0.0, "higher_is_better": True, "max_drop": 0.0}
    assert encode_goal(Goal(metric="map", minimize="pareto", max_drop=None))["minimize"] == "pareto"


def test_pareto_score_has_latency_and_loss_or_is_infeasible():
    goal = Goal(metric="map", reference=0.5, max_drop=None, minimize="pareto", float_ms=10.0)
    found = score(goal, 4.0, map=0.4)
    assert found.objectives == pytest.approx((4.0, 0.1))
    assert is_feasible(found)
    assert not is_feasible(score(goal, 1.0))
    bounded = Goal(metric="map", reference=0.5, max_drop=0.05, minimize="pareto", float_ms=10.0)
    assert score(bounded, 4.0, map=0.4).violation == pytest.approx(0.05)


@pytest.mark.parametrize(("value", "over"), [(0.75, 0.0), (0.7499, 0.0001), (0.76, 0.0), (0.8, 0.0)])
def test_violation_tolerates_round_off(value, over):
    goal = Goal(metric="top1", reference=0.76, max_drop=0.01)
    assert 0.76 - 0.75 > 0.01, "in floating point"
    assert goal.violation({"top1": value}) == pytest.approx(over)
    assert is_feasible(score(goal, 1.0, top1=value)) == (over == 0.0)


def test_accuracy_first_ranks_by_loss_among_those_fast_enough():
    goal = Goal(metric="map", reference=0.5, max_drop=None, minimize="accuracy", max_latency_ms=5.0)
    good, bad, slow = score(goal, 4.9, map=0.49), score(goal, 2.0, map=0.3), score(goal, 6.0)
    assert [found.objective for found in (good, bad)] == pytest.approx([0.01, 0.2])
    assert slow.violation == pytest.approx(1.0)
    assert sorted([slow, bad, good], key=lambda found: found.rank) == [good, bad, slow]
    assert not slow.assumed, "that it breaks the bound is known, though it is not scored"
    assert score(goal, 4.0).assumed


def test_proxy_rejection_gives_predicted_violation():
    goal = Goal(metric="map", reference=0.5, max_drop=0.01)
    believed = score(goal, 3.0, **{PROXY: 4.0, PREDICTED_METRIC: 0.3})
    assert believed.violation == pytest.approx(0.19)
    assert not believed.assumed
    unknown = score(goal, 12.0, **{PROXY: 30.0})
    assert (unknown.violation, unknown.assumed) == (0.0, True)
    held = score(goal, 20.0, map=0.5)
    assert sorted([believed, unknown, held], key=lambda found: found.rank) == [held, unknown, believed]


def test_violation_of_lower_is_better_metric_and_prediction():
    goal = Goal(metric="error", reference=0.1, higher_is_better=False, max_drop=0.02)
    assert goal.violation({"error": 0.15}) == pytest.approx(0.03)
    assert goal.violation({PREDICTED_METRIC: 0.15}) == pytest.approx(0.03)
    assert goal.violation({"error": 0.11}) == goal.violation({}) == 0.0


class Evaluators:
    """Engines that can be scored; the diary says by what."""

    def __init__(self, proxy: float | None = None, value: float | None = 0.45) -> None:
        self.proxy, self.value = proxy, value
        self.diary: list[str] = []

    def evaluate(self, handle: int, evaluator: str = "main") -> Accuracy | Failed:
        self.diary.append(evaluator)
        if evaluator == "proxy":
            return (
                Failed(stage="evaluate", reason="no")
                if self.proxy is None
                else Accuracy(metrics={"sqnr_db": self.proxy})
            )
        return Failed(stage="evaluate", reason="no") if self.value is None else Accuracy(metrics={"map": self.value})


GOAL = Goal(metric="map", reference=0.5, max_drop=0.01)
INCUMBENT = Interval(value=10.0, low=9.9, high=10.1)


def known(*pairs: tuple[float, float], latency_ms: float = 8.0) -> IncumbentState:
    """What a search knows: proxy and metric of earlier placements."""
    scored = [ScoredPlacement(latency_ms=latency_ms, value=value, proxy=proxy) for proxy, value in pairs]
    found = incumbent_state(INCUMBENT, scored)
    assert isinstance(found, IncumbentState)
    return found


def look(engines: Any, goal: Goal, latency_ms: float, incumbent: Interval | None, proxy: str | None = "proxy") -> Any:
    return AccuracyGate(goal=goal, evaluator="search", proxy=proxy).evaluate_accuracy(
        engines, 0, outcome(latency_ms), incumbent
    )


def metrics_of(found: Any) -> Mapping[str, float]:
    assert isinstance(found, Measured)
    return found.metrics


def test_all_candidates_have_proxy_and_fast_ones_full_metric():
    slow, fast = Evaluators(proxy=20.0), Evaluators(proxy=20.0)
    assert metrics_of(look(slow, GOAL, 11.0, INCUMBENT)) == {PROXY: 20.0}
    assert metrics_of(look(fast, GOAL, 5.0, INCUMBENT)) == {PROXY: 20.0, "map": 0.45}
    assert (slow.diary, fast.diary) == (["proxy"], ["proxy", "search"])


@pytest.mark.parametrize(("rejected", "metrics", "diary"), [
    (None, {"map": 0.45}, [FIRST_STAGE_EVALUATOR, "search"]),
    (0.2, {PREDICTED_METRIC: pytest.approx(0.3)}, [FIRST_STAGE_EVALUATOR]),
])  # fmt: skip
def test_candidate_rejected_in_first_stage_is_not_scored_in_full(rejected, metrics, diary):
    engines: Any = Evaluators()
    gate = AccuracyGate(goal=GOAL, evaluator="search", rejected_loss=lambda found: rejected)
    assert metrics_of(gate.evaluate_accuracy(engines, 0, outcome(5.0), INCUMBENT)) == metrics
    assert engines.diary == diary
    slow = Evaluators()
    gate.evaluate_accuracy(slow, 0, outcome(11.0), INCUMBENT)  # type: ignore[arg-type]
    assert slow.diary == []


def test_a_damaged_record_of_an_evaluator_makes_the_candidate_fail():
    def mixable(found: Accuracy) -> str:
        raise ValueError("the evidence of a score is damaged")

    gate = AccuracyGate(goal=GOAL, evaluator="search", mixable=mixable)
    found = gate.evaluate_accuracy(Evaluators(), 0, outcome(5.0), INCUMBENT)  # type: ignore[arg-type]
    assert isinstance(found, Failed)
    assert (found.stage, "damaged" in found.reason) == ("evaluate", True)


def test_a_candidate_that_the_proxy_rules_out_is_not_scored():
    witnesses = known((30.0, 0.499), (12.0, 0.40), (11.0, 0.42), (10.0, 0.38))
    engines = Evaluators(proxy=9.0)
    assert metrics_of(look(engines, GOAL, 5.0, witnesses)) == {PROXY: 9.0, PREDICTED_METRIC: pytest.approx(0.42)}
    assert engines.diary == ["proxy"]


@pytest.mark.parametrize(
    "witnesses",
    [
        known((12.0, 0.40), (11.0, 0.42)),  # too few
        known((12.0, 0.40), (11.0, 0.495), (10.0, 0.38)),  # one of the next ones held the bound
        known((12.0, 0.40), (11.0, 0.42), (10.0, 0.38), (5.0, 0.48)),  # one further away did better: no word to trust
    ],
)
def test_unproven_proxy_rejects_no_candidate(witnesses):
    engines = Evaluators(proxy=9.0)
    assert "map" in metrics_of(look(engines, GOAL, 5.0, witnesses))


def test_pareto_goal_scores_candidates_predicted_nondominated():
    goal = Goal(metric="map", reference=0.5, max_drop=None, minimize="pareto", float_ms=10.0)
    witnesses = known((12.0, 0.40), (11.0, 0.42), (10.0, 0.38), latency_ms=6.0)
    slower, faster = Evaluators(proxy=9.0), Evaluators(proxy=9.0)
    assert PREDICTED_METRIC in metrics_of(look(slower, goal, 7.0, witnesses))
    assert "map" in metrics_of(look(faster, goal, 5.0, witnesses))
    assert AccuracyGate(goal=goal).latency_to_beat(INCUMBENT) is None, "a slower placement may be more accurate"


def test_accuracy_goal_scores_fast_and_promising_candidates():
    goal = Goal(metric="map", reference=0.5, max_drop=None, minimize="accuracy", max_latency_ms=9.0)
    assert metrics_of(look(Evaluators(proxy=20.0), goal, 9.5, INCUMBENT)) == {PROXY: 20.0}
    assert "map" in metrics_of(look(Evaluators(proxy=20.0), goal, 8.5, INCUMBENT))
    witnesses = known((12.0, 0.40), (11.0, 0.42), (10.0, 0.38))
    assert "map" not in metrics_of(look(Evaluators(proxy=9.0), goal, 8.5, witnesses))


@pytest.mark.parametrize("engines", [Evaluators(proxy=None), Evaluators(proxy=20.0, value=None)])
def test_an_evaluator_that_fails_fails_the_candidate(engines):
    assert isinstance(look(engines, GOAL, 5.0, INCUMBENT), Failed)


def test_loss_lower_bound_is_none_without_proxy():
    assert loss_lower_bound(known((12.0, 0.40), (11.0, 0.42), (10.0, 0.38)).scored, None, GOAL) is None


def entries(*outcomes: Measured | Failed) -> list[JournalEntry]:
    return [
        JournalEntry(
            proposal=Proposal(number=n, choices=(n,), digest=str(n), origin="searcher"),
            result=TrialResult(number=n, outcome=found, elapsed_s=float(n)),
        )
        for n, found in enumerate(outcomes)
    ]


def test_best_of_pareto_goal_is_front_by_balance():
    goal = Goal(metric="map", reference=0.5, max_drop=None, minimize="pareto", float_ms=10.0)
    told = entries(
        outcome(10.0, map=0.5), outcome(4.0, map=0.48), outcome(3.0, map=0.1), outcome(5.0, map=0.47), outcome(2.0)
    )
    assert [trial.choices for trial in state_at_budgets(told, goal, [5], 8)[5].best] == [(1,), (2,), (0,)]
    assert [trial.choices for trial in state_at_budgets(told, goal, [5])[5].best] == [(1,)]


def test_best_of_accuracy_goal_is_by_loss_then_latency():
    goal = Goal(metric="map", reference=0.5, max_drop=None, minimize="accuracy", max_latency_ms=6.0)
    told = entries(outcome(7.0), outcome(5.0, map=0.4), outcome(5.5, map=0.5), outcome(4.0, map=0.5))
    assert [(t.choices, t.latency_ms) for t in state_at_budgets(told, goal, [4], 2)[4].best] == [
        ((3,), 4.0),
        ((2,), 5.5),
    ]


def test_metric_usage_counts_scored_and_proxy_agreement():
    scored = [outcome(5.0, map=value, **{PROXY: proxy}) for value, proxy in ((0.5, 40.0), (0.3, 9.0), (0.4, 12.0))]
    told = entries(*scored, outcome(6.0, **{PROXY: 3.0}), Failed(stage="build", reason="no"))
    found = state_at_budgets(told, GOAL, [9])[9]
    assert (found.scored, found.agreement) == (3, pytest.approx(1.0))
    assert state_at_budgets(entries(outcome(5.0)), Goal(), [1])[1].agreement is None


def test_score_of_rebuilt_candidate_includes_build_variance():
    """A searcher that receives 5 ms of a placement whose builds took 5 and 6 must not take 5.2 for something else."""
    once = score_outcome(Measured(samples_ms=(5.0,) * 20, build_s=0.1, measure_s=0.1), Goal())
    twice = Measured(samples_ms=(5.0,) * 20, rebuilt_ms=((6.0,) * 20,), build_s=0.1, measure_s=0.1)
    again = score_outcome(twice, Goal())
    assert isinstance(once, Score)
    assert isinstance(again, Score)
    assert (once.objective, once.stderr) == (5.0, 0.0)
    assert (again.objective, again.stderr) == (5.0, pytest.approx(0.5))
    assert state_at_budgets(entries(twice), Goal(), [1])[1].best[0].score == again
