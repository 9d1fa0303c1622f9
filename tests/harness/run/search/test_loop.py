"""The loop of a search: budget, duplicates, failures, constraint, and a resumed run that is the same run."""

from pathlib import Path

import numpy as np
import pytest
from incumbents import iter_incumbents

from harness.base.errors import UserError
from harness.measure.records import Failed, Measured
from harness.plugins.api import Candidate
from harness.results.journal import Journal, read_journal
from harness.results.search_log import Goal, state_at_budgets
from harness.run.search.loop import InitialPlacement, SearchLoopResult, SearchTask, run_search
from harness.workers.trial_pool import SyncExecutor
from search.api import Failure, Observation, Placement, Score
from search.space import Dimension, Edge, Space


def space_of(size: int) -> Space:
    return Space(
        tuple(
            Dimension(
                name=f"p{i}",
                group="g",
                kind="node_input",
                choices=("float", "int8"),
                edges=(Edge(f"t{i}", f"n{i}", 0),),
            )
            for i in range(size)
        )
    )


class Uniform:
    """The smallest searcher; outcomes change its random numbers, so a lost outcome changes its proposals."""

    def __init__(self, space, seed):
        self.space = space
        self.rng = np.random.default_rng(seed)
        self.told = []

    def ask(self, n):
        return [self.space.random(self.rng)]

    def tell(self, observation: Observation):
        self.told.append(observation)
        if isinstance(observation.outcome, Score):
            self.rng.random(int(observation.outcome.objective * 1000) % 7)


def latency(candidate: Candidate, incumbent=None):
    value = 10.0 - len(candidate.edges) * 0.5
    return Measured(samples_ms=(value, value + 0.01, value + 0.02), build_s=0.1, measure_s=0.1)


class Run:
    def __init__(self, folder: Path, *, size=6, evaluations=20, attempt=latency, goal=Goal(), seeds=("float", "all")):  # noqa: B008
        self.space = space_of(size)
        self.path = folder / "run.jsonl"
        self.evaluations = evaluations
        self.attempt = attempt
        self.goal = goal
        known = {"float": self.space.float_placement(), "all": self.space.quantize_all()}
        self.seeds = tuple(InitialPlacement(name=name, placement=known[name]) for name in seeds)
        self.attempts = 0
        self.stop_at = None

    def go(self, *, seed=3, stop_after=None):
        self.searcher = Uniform(self.space, seed)

        def attempt(candidate, incumbent):
            if stop_after is not None and self.attempts >= stop_after:
                raise KeyboardInterrupt
            self.attempts += 1
            return self.attempt(candidate, incumbent)

        def candidate(placement):
            edges = self.space.resolve(placement)
            return Candidate(digest=self.space.digest(placement), edges=edges, source=lambda: Path("never"))

        task = SearchTask(
            space=self.space, searcher=self.searcher, initial_design=self.seeds, candidate=candidate, goal=self.goal,
            evaluations=self.evaluations, stop_at=self.stop_at,
        )  # fmt: skip
        trials = []
        with Journal(self.path, {"run": 1}) as journal:
            self.result = run_search(task, SyncExecutor(attempt), journal, trials.append)
        return trials

    def choices(self):
        return [entry.proposal.choices for entry in read_journal(self.path)]


def test_budget_counts_unique_placements_and_initial_design(tmp_path):
    run = Run(tmp_path, evaluations=20)
    trials = run.go()
    assert run.attempts == 20 == trials[-1].evaluations
    assert [t.proposal.origin for t in trials[:2]] == ["initial:float", "initial:all"]


def test_duplicate_is_free_and_passed_to_searcher_again(tmp_path):
    run = Run(tmp_path, size=2, evaluations=4)
    trials = run.go()
    again = [t for t in trials if t.proposal.duplicate_of is not None]
    assert again
    assert run.attempts == 4
    assert len(run.searcher.told) == len(trials)


def test_a_searcher_that_only_repeats_itself_ends(tmp_path):
    run = Run(tmp_path, size=2, evaluations=50)
    run.go()
    assert run.attempts == 4


@pytest.mark.parametrize("stop_after", [0, 1, 2, 5, 11, 19])
def test_resumed_search_equals_uninterrupted_search(tmp_path, stop_after):
    whole = Run(tmp_path / "whole")
    whole.go()
    run = Run(tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        run.go(stop_after=stop_after)
    run.go()
    assert run.attempts == 20, "nothing that was measured is measured again"
    assert run.choices() == whole.choices()
    with pytest.raises(UserError, match="use another --out"):
        run.go(seed=4)


def test_a_changed_searcher_is_refused_on_resume(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.go(stop_after=8)
    with pytest.raises(UserError, match=r"resume refused at proposal 2.*use another --out"):
        run.go(seed=99)


def test_search_continues_after_failures(tmp_path):
    def fails_on_odd(candidate, incumbent):
        if len(candidate.edges) % 2:
            return Failed(stage="build", reason="odd", log_tail="tail")
        return latency(candidate)

    run = Run(tmp_path, attempt=fails_on_odd)
    trials = run.go()
    assert trials[-1].evaluations == 20
    failures = [o.outcome for o in run.searcher.told if isinstance(o.outcome, Failure)]
    assert failures[0] == Failure(stage="build", reason="odd")
    assert all(
        entry.result.outcome.log_tail == "tail"
        for entry in read_journal(run.path)
        if entry.result and isinstance(entry.result.outcome, Failed)
    )


def test_search_stops_if_all_initial_placements_fail(tmp_path):
    run = Run(tmp_path, attempt=lambda *_: Failed(stage="build", reason="no such operator", log_tail="the log"))
    with pytest.raises(
        UserError, match=r"(?s)no initial placement could be measured.*build: no such operator.*the log"
    ):
        run.go()
    assert run.attempts == 2


def test_incumbent_keeps_bound_and_slower_candidates_are_unscored(tmp_path):
    scored = []

    def attempt(candidate, incumbent):
        outcome = latency(candidate)
        value = outcome.samples_ms[1]
        if incumbent is not None and value >= incumbent.value:
            return outcome
        scored.append(candidate.digest)
        return Measured(
            samples_ms=outcome.samples_ms,
            build_s=0.1,
            measure_s=0.1,
            metrics={"map": 0.5 - 0.02 * len(candidate.edges)},
        )

    goal = Goal(metric="map", reference=0.5, max_drop=0.07)
    run = Run(tmp_path, attempt=attempt, goal=goal, evaluations=40)
    trials = run.go()
    entries = list(read_journal(run.path))
    winner = state_at_budgets(entries, goal, [40])[40].best[0]
    assert sum(winner.choices) == 3, "three pairs cost 0.06, a fourth would break the bound"
    assert trials[-1].best_ms == pytest.approx(8.51)
    assert len(scored) < 40
    values = [t.score.objective for t in iter_incumbents(entries, goal)]
    assert values == sorted(values, reverse=True)


def ended(run: Run, searcher, **changes):
    task = SearchTask(
        space=run.space, searcher=searcher, initial_design=run.seeds,
        candidate=lambda p: Candidate(digest=run.space.digest(p), edges=run.space.resolve(p), source=lambda: Path("x")),
        **{"evaluations": 20, **changes},
    )  # fmt: skip
    told = []
    with Journal(run.path, {"run": 1}) as journal:
        return run_search(task, SyncExecutor(latency), journal, told.append), told


def test_time_budget_of_zero_ends_search(tmp_path):
    run = Run(tmp_path)
    assert ended(run, Uniform(run.space, 1), evaluations=1000, seconds=0.0)[1] == []


def test_placement_of_wrong_size_fails_the_search(tmp_path):
    class Wrong(Uniform):
        def ask(self, n):
            return [Placement((0,))]

    run = Run(tmp_path)
    ending, told = ended(run, Wrong(run.space, 1))
    assert ending.evaluations == len(told) == 2
    assert ending.reason == "ValueError: a placement here has 6 choices, but got 1"
    assert "Traceback" in ending.failure.log_tail


@pytest.mark.parametrize("proposal", [(0.0,) * 6, ("1",) * 6, None])
def test_invalid_proposal_fails_the_search(tmp_path, proposal):
    class Wrong(Uniform):
        def ask(self, n):
            return [proposal and Placement(proposal)]

    run = Run(tmp_path)
    assert "Error: " in ended(run, Wrong(run.space, 1))[0].failure.reason
    assert len(run.choices()) == 2


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("failure", ["ask", "tell"])
def test_pending_trials_are_kept_when_searcher_fails(tmp_path, window, failure):
    class Breaks(Uniform):
        mended = False
        asked = 0

        def ask(self, n):
            self.asked += 1
            if failure == "ask" and self.asked == 6 and not self.mended:
                raise LookupError("a bug")
            return super().ask(n)

        def tell(self, observation):
            if failure == "tell" and len(self.told) == 6 and not self.mended:
                raise LookupError("a bug")
            super().tell(observation)

    run, whole = Run(tmp_path / "run"), Run(tmp_path / "whole")
    ending, told = ended(run, Breaks(run.space, 1), window=window)
    assert ending.reason == "LookupError: a bug"
    assert ending.evaluations == told[-1].evaluations < 20
    entries = list(read_journal(run.path))
    assert all(entry.result is not None or entry.proposal.duplicate_of is not None for entry in entries)
    Breaks.mended = True
    assert ended(run, Breaks(run.space, 1), window=window)[0] == SearchLoopResult(evaluations=20)
    ended(whole, Breaks(run.space, 1), window=window)
    assert run.choices() == whole.choices()


@pytest.mark.parametrize("window", [1, 3])
def test_evaluations_of_earlier_run_count_if_replay_ends_early(tmp_path, window):
    class Changed(Uniform):
        def ask(self, n):
            if len(self.told) < 5:
                return super().ask(n)
            if failure:
                raise LookupError("a bug")
            return []

    run = Run(tmp_path)
    assert ended(run, Uniform(run.space, 1), evaluations=12, window=window)[0] == SearchLoopResult(evaluations=12)
    before = run.path.read_bytes()
    failure = True
    ending, told = ended(run, Changed(run.space, 1), window=window)
    assert told[-1].evaluations < 12 == ending.evaluations
    assert ending.reason == "LookupError: a bug"
    failure = False
    silent = SearchLoopResult(evaluations=12, reason="it had nothing more to propose")
    assert ended(run, Changed(run.space, 1), window=window)[0] == silent
    assert run.path.read_bytes() == before


def test_failed_construction_of_searcher_spends_no_evaluations(tmp_path):
    failed = Failed(stage="search", reason="ValueError: no", log_tail="where")
    ending, told = ended(Run(tmp_path), failed)
    assert (ending, told) == (SearchLoopResult(evaluations=0, reason="ValueError: no", failure=failed), [])


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError])
@pytest.mark.parametrize("method", ["ask", "tell"])
def test_an_interruption_and_a_mistake_of_the_user_end_the_run(tmp_path, error, method):
    def raises(*_):
        raise error("stop")

    run = Run(tmp_path)
    searcher = Uniform(run.space, 1)
    setattr(searcher, method, raises)
    with pytest.raises(error, match="stop"):
        ended(run, searcher)


def test_early_end_has_reason(tmp_path):
    small = Run(tmp_path / "small", size=2)
    assert ended(small, Uniform(small.space, 1), evaluations=4)[0] == SearchLoopResult(evaluations=4)
    many = "it proposed only placements that were proposed before, 200 in a row"
    assert ended(small, Uniform(small.space, 1), evaluations=9)[0] == SearchLoopResult(evaluations=4, reason=many)
    silent = Uniform(small.space, 1)
    silent.ask = lambda n: []
    few = Run(tmp_path / "few")
    assert ended(few, silent)[0] == SearchLoopResult(evaluations=2, reason="it had nothing more to propose")


def test_incumbent_must_be_scored_and_feasible(tmp_path):
    """First a fast seed that breaks the bound, then the float model: the second is scored and becomes the incumbent."""
    asked = []

    def attempt(candidate, incumbent):
        asked.append(incumbent)
        outcome = latency(candidate)
        metrics = (
            {}
            if incumbent is not None and outcome.samples_ms[1] >= incumbent.value
            else {"map": 0.5 - 0.1 * len(candidate.edges)}
        )
        return Measured(samples_ms=outcome.samples_ms, build_s=0.1, measure_s=0.1, metrics=metrics)

    goal = Goal(metric="map", reference=0.5, max_drop=0.05)
    run = Run(tmp_path, attempt=attempt, goal=goal, evaluations=2, seeds=("all", "float"))
    trials = run.go()
    assert asked == [None, None]
    assert [t.best_ms for t in trials] == [None, pytest.approx(10.01)]
    assert [o.outcome.assumed for o in run.searcher.told] == [False, False]


def test_search_ends_if_expected_gain_is_small(tmp_path):
    run = Run(
        tmp_path,
        size=12,
        evaluations=100,
        attempt=lambda candidate, incumbent: Measured(samples_ms=(5.0, 5.01), build_s=0.1, measure_s=0.1),
    )
    run.stop_at = 0.8
    trials = run.go()
    assert len(trials) < 100
    assert run.result.reason == "further gain below 0.5% with 80% probability"
    assert trials[-1].expected_gain is not None
    run.stop_at = None
    run.go()
    assert run.attempts == 100
