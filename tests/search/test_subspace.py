"""Parts of a space, and searchers by name."""

import pytest

from search.algorithms.bandit_portfolio import PortfolioSearcher
from search.algorithms.block_coordinate import PerPatternSearcher
from search.algorithms.random import RandomSearcher
from search.api import Failure, Observation, Placement, Score
from search.archive import Archive
from search.subspace import TRUST_VARIABLE, SubspaceSearcher, known_outcome, load_searcher
from search.testing import synthetic_space

SPACE = synthetic_space(8, groups=2)


class Recorder:
    """Proposes everything quantized, and keeps the outcomes."""

    def __init__(self, space):
        self.space, self.told = space, []

    def ask(self, n):
        return [self.space.quantize_all()][:n]

    def tell(self, observation):
        self.told.append(observation)


def part(indices, base):
    recorders = []
    return SubspaceSearcher(
        SPACE, indices, base, make=lambda inside: recorders.append(Recorder(inside)) or recorders[0]
    ), recorders


def told(placement):
    return Observation(placement=placement, digest=SPACE.digest(placement), outcome=Score(objective=1.0))


def test_subspace_searcher_changes_only_its_dimensions():
    made, _ = part((0, 1, 2, 3), Placement((0, 0, 0, 0, 1, 0, 1, 0)))
    assert made.ask(1) == [Placement((1, 1, 1, 1, 1, 0, 1, 0))]
    assert made.embed(Placement((0, 1, 0, 1, 0, 0, 0, 0))) == Placement((0, 1, 0, 1, 1, 0, 1, 0))


def test_subspace_searcher_ignores_observations_off_its_base():
    made, (recorder,) = part((0, 1, 2, 3), Placement((0, 0, 0, 0, 1, 0, 1, 0)))
    made.tell(told(Placement((1, 0, 0, 0, 1, 0, 1, 0))))
    made.tell(told(Placement((0, 1, 0, 0, 0, 0, 0, 0))))
    (observation,) = recorder.told
    assert observation.placement == Placement((1, 0, 0, 0))
    assert observation.digest == recorder.space.digest(observation.placement)


def test_searchers_are_found_by_name_or_by_module():
    assert load_searcher("random") is RandomSearcher
    assert load_searcher("search.algorithms.random:RandomSearcher") is RandomSearcher
    with pytest.raises(ValueError, match=r"searcher is one of .*evolutionary.*, but got 'evolution'"):
        load_searcher("evolution")
    for use in ("os:system", "search.api:Space"):
        with pytest.raises(ValueError, match=rf"{use}.*no class with ask\(\) and tell\(\)"):
            load_searcher(use)


def test_known_outcome_returns_score_or_failure_for_placement():
    archive, failure = Archive(), Failure(stage="build", reason="no")
    placement, other = Placement((1,) * 8), Placement((0,) * 8)
    assert known_outcome(archive, placement, "d") is None
    archive.tell(Observation(placement=other, digest="d", outcome=failure))
    assert known_outcome(archive, placement, "d") == Observation(placement=placement, digest="d", outcome=failure)
    archive.tell(Observation(placement=other, digest="d", outcome=Score(objective=1.0)))
    found = known_outcome(archive, placement, "d")
    assert found == Observation(placement=placement, digest="d", outcome=Score(objective=1.0))


@pytest.mark.parametrize("use", ["os:system", "search.algorithms.random:RandomSearcher"])
@pytest.mark.parametrize(("searcher", "params"), [(PortfolioSearcher, "members"), (PerPatternSearcher, "searcher")])
def test_members_from_modules_need_trust(use, searcher, params, monkeypatch):
    monkeypatch.delenv(TRUST_VARIABLE)
    with pytest.raises(ValueError, match=r"--trust-plugins"):
        searcher(SPACE, seed=0, **{params: [use, "random"] if params == "members" else use})
