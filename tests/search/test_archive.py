"""What an archive makes of repeated tells, failures and ties."""

import math

import pytest

from search.api import Failure, Observation, Placement, Score
from search.archive import Archive, improves
from search.synthetic_problem import synthetic_space


def told(name, objective=None, **facts):
    outcome = Failure(stage="build", reason="no") if objective is None else Score(objective=objective, **facts)
    return Observation(placement=Placement((len(name),)), digest=name, outcome=outcome)


def filled(*observations):
    archive = Archive()
    for observation in observations:
        archive.tell(observation)
    return archive


def names(entries):
    return [entry.digest for entry in entries]


def test_ranking_puts_feasible_before_infeasible():
    archive = filled(
        told("slow", 9.0), told("broken", 1.0, violation=0.2), told("fast", 3.0), told("less", 2.0, violation=0.1)
    )
    assert names(archive.ranked) == ["fast", "slow", "less", "broken"]
    assert names(archive.best(2)) == ["fast", "slow"]
    assert names(archive) == ["slow", "broken", "fast", "less"], "iteration goes in the order of the tells"
    assert names(filled(told("b", 1.0), told("a", 1.0)).ranked) == ["b", "a"]


def test_repeated_tells_give_error_weighted_mean():
    (entry,) = filled(told("a", 10.0, stderr=0.1), told("a", 10.3, stderr=0.2)).ranked
    assert entry.score.objective == pytest.approx(10.06)
    assert entry.tells == 2
    assert 1 / math.sqrt(125) < entry.score.stderr < 0.2, "a gap of 1.3 errors widens the error of the mean"


def test_a_rebuild_that_disagrees_widens_the_error():
    (entry,) = filled(told("a", 4.0, stderr=0.01), told("a", 8.0, stderr=0.01)).ranked
    assert entry.score.objective == pytest.approx(6.0)
    assert entry.score.stderr == pytest.approx(2.0), "half the gap, not 0.007"


@pytest.mark.parametrize(("errors", "stderr"), [((0.0, 0.5), 1.5), ((0.0, 0.0), 1.5), ((0.0, 9.0), 9.0 / 2**0.5)])
def test_repeated_tells_without_errors_give_plain_mean_and_scatter(errors, stderr):
    first, second = errors
    (entry,) = filled(told("a", 1.0, stderr=first), told("a", 4.0, stderr=second)).ranked
    assert entry.score == Score(objective=2.5, stderr=pytest.approx(stderr))


def test_identical_score_counts_as_one_measurement():
    (entry,) = filled(told("a", 1.0, stderr=0.1), told("a", 1.0, stderr=0.1)).ranked
    assert (entry.score.stderr, entry.tells) == (0.1, 1)


def test_repeated_tell_updates_metrics_and_keeps_first_placement():
    again = Observation(placement=Placement((9,)), digest="a", outcome=Score(objective=2.0, metrics={"top1": 0.7}))
    (entry,) = filled(told("a", 1.0, metrics={"top1": 0.6}), again).ranked
    assert entry.score.metrics == {"top1": 0.7}
    assert entry.placement == Placement((1,))


def test_score_replaces_earlier_failure():
    archive = filled(told("a"), told("b", 1.0), told("b"))
    assert list(archive.failures) == ["a"]
    assert len(archive) == 1, "a failure after a score leaves the score"
    archive.tell(told("a", 2.0))
    assert not archive.failures
    assert names(archive.ranked) == ["b", "a"]


def test_archive_contains_asked_scored_and_failed():
    space = synthetic_space(4)
    first, second = space.float_placement(), space.quantize_all()
    archive, proposals = filled(told("scored", 1.0), told("failed")), iter([first, second])
    assert archive.ask(1, lambda: next(proposals, None), space) == [first]
    assert all(name in archive for name in ("scored", "failed", space.digest(first)))
    assert space.digest(second) not in archive
    assert archive.ask(3, lambda: next(proposals, None), space) == [second], "fewer where there are no more"
    assert archive.pending == {space.digest(first): first, space.digest(second): second}
    archive.tell(Observation(placement=first, digest=space.digest(first), outcome=Score(objective=1.0)))
    assert list(archive.pending) == [space.digest(second)]
    assert space.digest(first) in archive


@pytest.mark.parametrize(
    ("new", "old", "better"),
    [
        (Score(objective=9.0), Score(objective=10.0), True),
        (Score(objective=10.0), Score(objective=10.0), False),
        (Score(objective=9.9, stderr=0.1), Score(objective=10.0, stderr=0.1), False),
        (Score(objective=9.8, stderr=0.1), Score(objective=10.0, stderr=0.1), True),
        (Score(objective=99.0), Score(objective=1.0, violation=0.1), True),
        (Score(objective=1.0, violation=0.1), Score(objective=99.0), False),
        (Score(objective=1.0, violation=0.1), Score(objective=2.0, violation=0.1), True),
    ],
)
def test_only_a_gain_above_the_noise_improves(new, old, better):
    assert improves(new, old) is better


def test_tie_does_not_displace_incumbent():
    archive = filled(
        told("first", 10.0, stderr=0.1), told("lucky", 9.9, stderr=0.1), told("better", 9.5, stderr=0.1),
        told("worse", 11.0, stderr=0.1),
    )  # fmt: skip
    assert names(archive.incumbents(4)) == ["better", "first", "lucky", "worse"]
    assert names(archive.incumbents(2)) == ["better", "first"]
    assert names(archive.incumbents(4, significance=0)) == names(archive.ranked)


def test_remeasured_incumbent_loses_rank_if_slower():
    archive = filled(told("lucky", 1.0, stderr=0.1), told("sound", 2.0, stderr=0.1), told("lucky", 9.0, stderr=0.1))
    assert names(archive.incumbents(2)) == ["lucky", "sound"], "the readings disagree so much that nothing is known"
    archive.tell(told("lucky", 9.1, stderr=0.1))
    assert names(archive.incumbents(2)) == ["sound", "lucky"]


def test_repeated_tells_pool_each_objective():
    one, two = told("a", 1.0, objectives=(1.0, 0.2)), told("a", 3.0, objectives=(3.0, 0.4), violation=0.2)
    (entry,) = filled(one, two).ranked
    assert entry.score.objectives == pytest.approx((2.0, 0.3))
    assert entry.score.violation == pytest.approx(0.1)
    (entry,) = filled(*(told("a", n, violation=n, stderr=2.0) for n in (1.0, 3.0))).ranked
    assert entry.score.violation == pytest.approx(2.0)
    (entry,) = filled(told("a", 1.0), told("a", 3.0, objectives=(3.0, 0.4))).ranked
    assert entry.score.objectives == (3.0, 0.4), "the latest where they do not match"


def test_base_entries_order_front_ends_first_single_objective_last():
    archive = filled(told("fast", 1.0), told("slow", 9.0))
    assert not archive.is_multi_objective
    assert names(archive.base_entries(2)) == ["fast", "slow"]
    archive = filled(
        told("fast", 1.0, objectives=(1.0, 9.0)),
        told("near fast", 1.5, objectives=(1.5, 8.9)),
        told("middle", 4.0, objectives=(4.0, 4.0)),
        told("beaten", 5.0, objectives=(5.0, 5.0)),
        told("exact", 9.0, objectives=(9.0, 1.0)),
        told("unknown", 0.5, assumed=True),
        told("broken", 0.1, objectives=(0.1, 0.1), violation=0.1),
    )
    assert archive.is_multi_objective
    found = names(archive.base_entries(7))
    assert set(found[:2]) == {"fast", "exact"}
    assert found[2:] == ["middle", "near fast", "beaten", "unknown", "broken"]
    assert names(archive.best(1)) == ["fast"], "best goes by latency, as before"
