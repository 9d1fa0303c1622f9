"""Final selection: a race among the rebuilt best placements of each search, from which one is chosen.

The lowest of a hundred noisy readings is too low by chance. So the few best placements are timed in turns with the
float model, close ones for longer, and only these readings decide. Tables report the readings of the confirmation,
which are independent of them. (Boesel, Nelson and Kim, "Using ranking and selection to 'clean up' after simulation
optimization", Operations Research 51, 2003; irace has a postselection race.)

A search evaluates placements in the form of Q/DQ pairs that its runtime usually runs fastest. If it started from the
placement of another tool's model, that model competes too, because its own form may be faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from harness.base.progress import Observer
from harness.config.experiment import SearchSpec
from harness.config.sections import TurnSchedule
from harness.graph.io.digests import digest_file
from harness.measure.elimination import TURNS_PER_RACING_ROUND, build_variance_slack, surviving
from harness.measure.turn_log import MAX_GROUP_ROWS, TurnEvent, TurnMatrix, estimate_noise_floor
from harness.plugins.api import Candidate
from harness.results.artifacts import FLOAT_ROW
from harness.results.journal import read_journal
from harness.results.search_log import BudgetState, Evaluation, Goal, evaluations_until_result, state_at_budgets
from harness.results.turns import FINAL_SELECTION_LOG_NAME, median_speedups, read_comparison, turn_speedups
from harness.run.confirm.confirmation import (
    EngineFactory,
    PairedComparison,
    TimedRow,
    run_comparison,
    warn_if_disturbed,
)
from harness.run.prepare.methods import (
    WarmStartModel,
    external_searcher_model_path,
    is_external_searcher,
    task_for_method,
    warm_start_models,
)
from harness.run.prepare.task import Task
from harness.run.select.recovery import Recovery
from harness.run.task_run import TaskRun
from harness.workers.engines import Engines
from search.space import Placement

SAMPLES_PER_TURN = 3  # smallest number of inferences in a turn
FIRST_SCHEDULE = TurnSchedule(builds=1, rounds=TURNS_PER_RACING_ROUND[0], samples=SAMPLES_PER_TURN)
K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection(Generic[K]):
    """Result of a race.

    Attributes:
        surviving: Rows of each group that were not eliminated, in the order of the group; failed rows are eliminated.
        speedups: Median speedup over the baseline by row, without rows that failed.
    """

    surviving: dict[K, list[str]]
    speedups: dict[str, float]


def select(
    comparison: PairedComparison,
    groups: Mapping[K, Sequence[str]],
    open_engines: EngineFactory,
    observer: Observer,
    *,
    top_k: int = 1,
    retry_failed: bool = False,
    is_time_up: Callable[[], bool] = lambda: False,
) -> Selection[K]:
    """Run elimination rounds with fresh builds until every group has at most `top_k` rows, or no round is left.

    The rows of a round depend only on the turns before it, so a repeated race times nothing again.

    Args:
        comparison: All rows, with a log and the schedule of the first round.
        groups: Names of the rows that compete with each other; a row may be in several groups.
        top_k: Number of rows to select from each group.
        retry_failed: Whether failed rows are timed once more.
        is_time_up: Function that returns whether no further round may start; the first one and logged ones are used.

    Raises:
        UserError: The baseline fails, or the log cannot be written.
    """
    surviving_rows = {key: list(group) for key, group in groups.items()}
    rows, events = comparison.rows, tuple[TurnEvent, ...]()
    for number, turns in enumerate(TURNS_PER_RACING_ROUND):
        if number and is_time_up() and all(event.build < number for event in events):
            observer.say(f"{comparison.name}: ended after elimination round {number}, because of the time limit")
            break
        schedule = comparison.schedule.model_copy(update={"rounds": turns})
        this_round = replace(comparison, rows=rows, schedule=schedule, first_build=number)
        events = run_comparison(this_round, open_engines, observer, retry_failed)
        readings = TurnMatrix(event for event in events if event.build <= number)
        slack = build_variance_slack(
            number + 1, max(comparison.noise_floor, estimate_noise_floor(readings, comparison.baseline.name))
        )
        ratios = turn_speedups(readings, comparison.baseline.name)
        surviving_rows = {key: _surviving(group, ratios, top_k, slack) for key, group in surviving_rows.items()}
        close = {name for group in surviving_rows.values() if len(group) > top_k for name in group}
        rows = tuple(row for row in comparison.rows if row.name in close)
        if not rows:
            break
    warn_if_disturbed(comparison.name, events, observer)
    return Selection(surviving=surviving_rows, speedups=median_speedups(events, comparison.baseline.name))


def select_winner(comparison: PairedComparison, open_engines: EngineFactory, observer: Observer) -> tuple[str, float]:
    """Run a race of all rows for one winner, and return its name and its speedup over the baseline.

    If no row survives, the fastest row with turns in the log wins; without any, the result is ("", 0.0).

    Raises:
        UserError: The baseline fails, or the log cannot be written.
    """
    found = select(comparison, {"all": [row.name for row in comparison.rows]}, open_engines, observer)
    speedups = found.speedups
    won = max(found.surviving["all"] or speedups, key=speedups.__getitem__, default="")
    return won, speedups.get(won, 0.0)


def _surviving(
    group: Sequence[str], ratios: Mapping[str, Mapping[tuple[int, int], float]], top_k: int, slack: float
) -> list[str]:
    """Return the rows of a group that were timed and are not eliminated."""
    timed = [name for name in group if name in ratios]
    turns = sorted({turn for name in timed for turn in ratios[name]})
    if not turns:
        return timed
    log_ms = -np.log([[ratios[name].get(turn, np.nan) for turn in turns] for name in timed])
    return [name for name, stays in zip(timed, surviving(log_ms, top_k, slack), strict=True) if stays]


MAX_FRONT_CANDIDATES = 8  # of a Pareto front, unless `top_k` is larger
Incumbent = Evaluation | WarmStartModel
"""An evaluated placement, or the model of another tool whose placement was an initial one."""
_GroupKey = tuple[str | int, ...]
_StatesByBudget = Mapping[str, Mapping[int, BudgetState]]
_IncumbentsByBudget = Mapping[str, Mapping[int, tuple[Incumbent, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionResult:
    """Selection among the best placements of the searches of a task.

    Attributes:
        states: State by name of the search and by budget; empty without a search.
        incumbents: Placements to confirm by name of the search and by budget, the winner of the race first.
        speedups: Speedups over the float model in the race, by digest; empty without a race.
        surviving: Digests that the race over all seeds did not eliminate, by name of the searcher and budget.
    """

    states: _StatesByBudget
    incumbents: _IncumbentsByBudget
    speedups: Mapping[str, float] = field(default_factory=dict)
    surviving: Mapping[tuple[str, int], Collection[str]] = field(default_factory=dict)


def select_final(
    running: TaskRun,
    open_engines: Callable[[], AbstractContextManager[Engines]],
    retry_failed: bool = False,
    recovery: Recovery | None = None,
) -> SelectionResult:
    """Race the best placements of each search, and return the incumbents to confirm, best first.

    The turns are logged in `final_selection.jsonl`, so a resumed task has the same winners. If a winner computes a
    wrong result, all incumbents are compared with their files, and the race is repeated without the wrong ones.

    Args:
        open_engines: Function that opens engines in a fresh process.
        retry_failed: Whether failed rows are timed once more.
        recovery: Recovered models, which compete at the largest budget, and estimated losses of finalists. Of files
            that the race does not distinguish, the one with the smallest loss wins. A file that is expected to miss the
            bound is a finalist only if this is expected of all files of its search.

    Raises:
        UserError: The float model fails, or the log cannot be written.
    """
    recovery = recovery or Recovery()
    selection = _race_incumbents(running, open_engines, retry_failed, recovery)
    by_search = [(run, selection.incumbents.get(run.name, {}).values()) for run in running.task.spec.runs]
    if any(
        _computes_wrong_result(running, run, each) for run, ranked in by_search for each in chain.from_iterable(ranked)
    ):
        return _race_incumbents(running, open_engines, retry_failed, recovery, check_missing=True)
    return selection


def _computes_wrong_result(running: TaskRun, run: SearchSpec, leader: Incumbent, check_missing: bool = True) -> bool:
    """Return whether the runtime computes a wrong result for an incumbent.

    Args:
        check_missing: Whether an incumbent without a check is checked now; otherwise it counts as right.
    """
    if running.checker is None:
        return False
    candidate = _candidate_writer(run, running.task)(leader)
    found = (
        running.checker.check(candidate, name=leader.digest)
        if check_missing
        else running.checker.recorded_check(candidate)
    )
    return found is not None and found.is_wrong


def _race_incumbents(
    running: TaskRun,
    open_engines: Callable[[], AbstractContextManager[Engines]],
    retry_failed: bool,
    recovery: Recovery,
    check_missing: bool = False,
) -> SelectionResult:
    """Select by a race, without incumbents that compute wrong results; see `_exclude_wrong_results`."""
    states, external = _exclude_wrong_results(running, recovery, check_missing)
    bound, losses = running.judge.goal, recovery.losses
    incumbents: dict[str, dict[int, tuple[Incumbent, ...]]] = {
        run.name: {
            budget: _expected_within(
                (*state.best, *(external.get(run.name, {}).get(budget, ()) if state.best else ())), losses, bound
            )
            for budget, state in states.get(run.name, {}).items()
        }
        for run in running.task.spec.runs
    }
    if running.judge.goal.minimize != "latency":
        return SelectionResult(states=states, incumbents=_incumbents_or_fastest_wrong(running, incumbents))
    comparison = _make_comparison(running, incumbents)
    has_race = running.experiment.confirmation.candidates > 1  # else a log is of an earlier run with more
    by_search: dict[_GroupKey, list[str]] = {
        (name, budget): [leader.digest for leader in leaders]
        for name, budgets in incumbents.items()
        for budget, leaders in budgets.items()
    }
    by_searcher = _groups_by_searcher(running, incumbents)
    groups, top_k = by_search | by_searcher, running.experiment.confirmation.top_k
    speedups: Mapping[str, float] = {}
    if len(comparison.rows) > 1:
        selected = select(
            comparison,
            groups,
            open_engines,
            running.observer,
            top_k=top_k,
            retry_failed=retry_failed,
            is_time_up=lambda: running.limit is not None and not running.limit.allows_recovery,
        )
        groups, speedups = selected.surviving, selected.speedups
    elif has_race:
        speedups = median_speedups(read_comparison(running.folder / FINAL_SELECTION_LOG_NAME), FLOAT_ROW)
    finalists = {
        name: {
            budget: rank_finalists(leaders, groups[name, budget], speedups, losses)[:top_k]
            for budget, leaders in budgets.items()
        }
        for name, budgets in incumbents.items()
    }
    surviving = {(str(key[0]), int(key[1])): frozenset(groups[key]) for key in by_searcher}
    return SelectionResult(
        states=states,
        incumbents=_incumbents_or_fastest_wrong(running, finalists),
        speedups=speedups,
        surviving=surviving,
    )


def _exclude_wrong_results(
    running: TaskRun, recovery: Recovery, check_missing: bool
) -> tuple[_StatesByBudget, Mapping[str, Mapping[int, tuple[WarmStartModel, ...]]]]:
    """Return the states of the searches and their warm-start models, without models that compute wrong results.

    The next best placements replace wrong ones.

    Args:
        check_missing: Whether incumbents that were never compared with their files are compared now.
    """
    wrong, seen, largest = set[str](), set[str](), max(running.experiment.budget.evaluations)
    external = _warm_start_models_by_budget(running) | {
        name: {largest: models} for name, models in recovery.models.items()
    }
    while True:
        states = _states_by_search(running, wrong)
        before = len(wrong)
        for run in running.task.spec.runs if states else ():
            leaders: list[Incumbent] = [leader for state in states[run.name].values() for leader in state.best]
            leaders += chain.from_iterable(external.get(run.name, {}).values())
            for leader in (each for each in leaders if each.digest not in seen):
                seen.add(leader.digest)
                if _computes_wrong_result(running, run, leader, check_missing):
                    wrong.add(leader.digest)
        if len(wrong) == before:
            break
    external_right = {
        name: {budget: tuple(model for model in models if model.digest not in wrong) for budget, models in each.items()}
        for name, each in external.items()
    }
    return states, external_right


def _incumbents_or_fastest_wrong(running: TaskRun, incumbents: _IncumbentsByBudget) -> _IncumbentsByBudget:
    """Return the incumbents, and the fastest wrong placement of a search that has no other, for the tables."""
    if running.checker is None or all(leaders for budgets in incumbents.values() for leaders in budgets.values()):
        return incumbents
    states = _states_by_search(running)
    return {
        name: {
            budget: leaders or (states[name][budget].best[:1] if name in states else ())
            for budget, leaders in budgets.items()
        }
        for name, budgets in incumbents.items()
    }


def _warm_start_models_by_budget(running: TaskRun) -> dict[str, dict[int, tuple[WarmStartModel, ...]]]:
    """Return the models of other tools whose placements each search has evaluated within each budget.

    Empty without a race, or with a bound on accuracy, because these models have no scores.
    """
    goal, task, budgets = running.judge.goal, running.task, running.experiment.budget.evaluations
    raced = goal.minimize == "latency" and running.experiment.confirmation.candidates > 1
    if not raced or (goal.metric is not None and goal.max_drop is not None):
        return {}
    found: dict[str, dict[int, tuple[WarmStartModel, ...]]] = {}
    for run, journal in _search_journals(running):
        if models := warm_start_models(task, run.searcher):
            spent = evaluations_until_result(read_journal(journal), {model.placement_digest for model in models})
            found[run.name] = {
                budget: tuple(model for model in models if spent.get(model.placement_digest, math.inf) <= budget)
                for budget in budgets
            }
    return found


def _groups_by_searcher(running: TaskRun, incumbents: _IncumbentsByBudget) -> dict[_GroupKey, list[str]]:
    """Return the incumbents of all seeds by searcher and budget; the main table has one of them as a row."""
    groups: dict[_GroupKey, dict[str, None]] = {}
    for run in running.task.spec.runs:
        for budget, leaders in incumbents[run.name].items():
            group = groups.setdefault((run.searcher.name, budget, "all seeds"), {})
            group.update(dict.fromkeys(leader.digest for leader in leaders))
    return {key: [*group] for key, group in groups.items()}


def _states_by_search(running: TaskRun, without: Collection[str] = ()) -> _StatesByBudget:
    budgets, goal = running.experiment.budget.evaluations, running.judge.goal
    return {
        run.name: state_at_budgets(read_journal(journal), goal, budgets, _incumbent_count(running), without)
        for run, journal in _search_journals(running)
    }


def _search_journals(running: TaskRun) -> Iterator[tuple[SearchSpec, Path]]:
    """Yield each search with its journal; nothing if the space is empty."""
    for run in running.task.spec.runs if len(running.task.searched_space) else ():
        yield run, running.folder / "runs" / f"{run.name}.jsonl"


def _incumbent_count(running: TaskRun) -> int:
    """Return the number of incumbents per search."""
    confirmation = running.experiment.confirmation
    others = {"latency": confirmation.candidates, "pareto": MAX_FRONT_CANDIDATES}
    return max(confirmation.top_k, others.get(running.judge.goal.minimize, 1))


def _make_comparison(running: TaskRun, incumbents: _IncumbentsByBudget) -> PairedComparison:
    """Return the paired comparison of all incumbents; one that several searches found is a single row."""
    task = running.task
    has_race = running.experiment.confirmation.candidates > 1
    runs = [run for run in task.spec.runs if has_race and incumbents[run.name]]  # none if all precisions are emulated
    rows = {
        leader.digest: TimedRow(name=leader.digest, candidate=candidate(leader))
        for run in runs
        for candidate in [_candidate_writer(run, task)]
        for leaders in incumbents[run.name].values()
        for leader in leaders
    }
    external = {
        leader.digest: digest_file(leader.path)
        for run in runs
        for leader in chain.from_iterable(incumbents[run.name].values())
        if isinstance(leader, WarmStartModel)
    }
    header = {
        "model_sha256": digest_file(task.model_file),
        "rows": sorted(rows),
        **({"told": external} if external else {}),  # the digest of a placement determines its file
        "heats": list(TURNS_PER_RACING_ROUND),
        "samples": SAMPLES_PER_TURN,
        "group": MAX_GROUP_ROWS,
        "backend": dict(running.engines.describe()),
    }
    unquantized = task.candidate(task.space.float_placement())
    return PairedComparison(
        name="final selection",
        path=running.folder / FINAL_SELECTION_LOG_NAME,
        header=header,
        baseline=TimedRow(name=FLOAT_ROW, candidate=unquantized),
        rows=tuple(rows.values()),
        schedule=FIRST_SCHEDULE,
        noise_floor=running.noise_floor,
    )


def _candidate_writer(run: SearchSpec, task: Task) -> Callable[[Incumbent], Candidate]:
    """Return a function that makes the candidate of an incumbent of a search."""
    own_task = None if is_external_searcher(run.searcher) else task_for_method(task, run.searcher)

    def make_candidate(leader: Incumbent) -> Candidate:
        if isinstance(leader, WarmStartModel):
            file = task.runtime_input_file(leader.path)
            return Candidate(digest=digest_file(file)[:16], edges=(), source=lambda: file)
        if own_task is not None:
            return own_task.candidate(Placement(leader.choices))
        path = external_searcher_model_path(run, task, leader.digest)
        return Candidate(digest=leader.digest, edges=(), source=lambda: path)

    return make_candidate


def _expected_within(leaders: tuple[Incumbent, ...], losses: Mapping[str, float], goal: Goal) -> tuple[Incumbent, ...]:
    """Return the incumbents whose estimated loss keeps the bound, or all if none does."""
    kept = tuple(leader for leader in leaders if goal.loss_excess(losses.get(leader.digest, 0.0)) == 0)
    return kept or leaders


def rank_finalists(
    leaders: Sequence[Incumbent],
    close: Sequence[str],
    speedups: Mapping[str, float],
    losses: Mapping[str, float] | None = None,
) -> tuple[Incumbent, ...]:
    """Return the incumbents in the order of the race, or in the given order without a race; failed ones come last.

    Of those that the race does not distinguish, one with a smaller estimated loss comes first. Models of other tools
    are left out if they failed, because they have no other reading, and come after placements that they tie with,
    because a placement can be explained.

    Args:
        leaders: Incumbents by the samples of the search, best first, and then models of other tools.
        close: Digests of the incumbents that the race did not eliminate.
        speedups: Speedups over the float model in the race, by digest; empty without a race, none of failed incumbents.
        losses: Estimated losses by digest; None without a bound. Survivors without one come after those with one.
    """
    known_losses = losses or {}
    has_evaluation = any(isinstance(leader, Evaluation) and leader.digest in close for leader in leaders)
    ranked = (leader for leader in leaders if isinstance(leader, Evaluation) or leader.digest in speedups)

    def order(leader: Incumbent) -> tuple[bool, bool, float, float]:
        external = isinstance(leader, WarmStartModel) and leader.digest not in known_losses
        loss = known_losses.get(leader.digest, math.inf) if leader.digest in close else 0.0
        return leader.digest not in close, has_evaluation and external, loss, -speedups.get(leader.digest, 0.0)

    return tuple(sorted(ranked, key=order))
