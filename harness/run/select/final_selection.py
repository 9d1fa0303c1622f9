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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, TypeVar

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
from harness.results.search_log import BudgetState, Evaluation, evaluations_until_result, state_at_budgets
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
from search.space import Placement

SAMPLES_PER_TURN = 3  # smallest number of inferences in a turn
FIRST_SCHEDULE = TurnSchedule(builds=1, rounds=TURNS_PER_RACING_ROUND[0], samples=SAMPLES_PER_TURN)
MAX_FRONT_CANDIDATES = 8  # of a Pareto front, unless `top_k` is larger
Incumbent = Evaluation | WarmStartModel
"""An evaluated placement, or the model of another tool whose placement was an initial one."""
K = TypeVar("K")
_GroupKey = tuple[str | int, ...]
_StatesByBudget = Mapping[str, Mapping[int, BudgetState]]
_ModelsByBudget = Mapping[str, Mapping[int, tuple[WarmStartModel, ...]]]
_IncumbentsByBudget = dict[str, dict[int, tuple[Incumbent, ...]]]


def select(
    comparison: PairedComparison,
    groups: Mapping[K, Sequence[str]],
    open_engines: EngineFactory,
    observer: Observer,
    *,
    top_k: int = 1,
    retry_failed: bool = False,
    is_time_up: Callable[[], bool] = lambda: False,
) -> tuple[dict[K, list[str]], dict[str, float]]:
    """Run elimination rounds with fresh builds until every group has at most `top_k` rows, or no round is left.

    The rows of a round depend only on the turns before it, so a repeated race times nothing again.

    Args:
        comparison: All rows, with a log and the schedule of the first round.
        groups: Names of the rows that compete with each other; a row may be in several groups.
        top_k: Number of rows to select from each group.
        retry_failed: Whether failed rows are timed once more.
        is_time_up: Function that returns whether no further round may start; the first one and logged ones are used.

    Returns:
        Rows of each group that were not eliminated, in the order of the group; failed rows are eliminated. Median
        speedup over the baseline by row, without rows that failed.
    """
    left = {key: list(group) for key, group in groups.items()}
    rows, events, baseline = comparison.rows, tuple[TurnEvent, ...](), comparison.baseline.name
    for number, turns in enumerate(TURNS_PER_RACING_ROUND):
        if number and is_time_up() and all(event.build < number for event in events):
            observer.say(f"{comparison.name}: ended after elimination round {number}, because of the time limit")
            break
        schedule = comparison.schedule.model_copy(update={"rounds": turns})
        this_round = replace(comparison, rows=rows, schedule=schedule, first_build=number)
        events = run_comparison(this_round, open_engines, observer, retry_failed)
        readings = TurnMatrix(event for event in events if event.build <= number)
        slack = build_variance_slack(number + 1, max(comparison.noise_floor, estimate_noise_floor(readings, baseline)))
        ratios = turn_speedups(readings, baseline)
        for key, group in left.items():
            timed = [name for name in group if name in ratios]
            if numbers := sorted({turn for name in timed for turn in ratios[name]}):
                log_ms = -np.log([[ratios[name].get(turn, np.nan) for turn in numbers] for name in timed])
                stays = surviving(log_ms, top_k, slack)
                timed = [name for name, stay in zip(timed, stays, strict=True) if stay]
            left[key] = timed
        close = {name for group in left.values() if len(group) > top_k for name in group}
        rows = tuple(row for row in comparison.rows if row.name in close)
        if not rows:
            break
    warn_if_disturbed(comparison.name, events, observer)
    return left, median_speedups(events, baseline)


def select_winner(comparison: PairedComparison, open_engines: EngineFactory, observer: Observer) -> tuple[str, float]:
    """Run a race of all rows for one winner, and return its name and its speedup over the baseline.

    If no row survives, the fastest row with turns in the log wins; without any, the result is ("", 0.0).
    """
    left, speedups = select(comparison, {"all": [row.name for row in comparison.rows]}, open_engines, observer)
    won = max(left["all"] or speedups, key=speedups.__getitem__, default="")
    return won, speedups.get(won, 0.0)


class SelectionResult(NamedTuple):
    """Selection among the best placements of the searches of a task.

    Attributes:
        states: State by name of the search and by budget; empty without a search.
        incumbents: Placements to confirm by name of the search and by budget, the winner of the race first.
        speedups: Speedups over the float model in the race, by digest; empty without a race.
        surviving: Digests that the race over all seeds did not eliminate, by name of the searcher and budget.
    """

    states: _StatesByBudget
    incumbents: _IncumbentsByBudget
    speedups: Mapping[str, float]
    surviving: Mapping[tuple[str, int], Collection[str]]


def select_final(
    running: TaskRun, open_engines: EngineFactory, retry_failed: bool, recovery: Recovery
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
    """
    selection = _race_incumbents(running, open_engines, retry_failed, recovery)
    for run in running.task.spec.runs:
        for leader in chain(*selection.incumbents[run.name].values()):
            if _computes_wrong_result(running, run, leader):
                return _race_incumbents(running, open_engines, retry_failed, recovery, check_missing=True)
    return selection


def _computes_wrong_result(running: TaskRun, run: SearchSpec, leader: Incumbent, check_missing: bool = True) -> bool:
    """Return whether the runtime computes a wrong result for an incumbent.

    Args:
        check_missing: Whether an incumbent without a check is checked now; otherwise it counts as right.
    """
    checker = running.checker
    if checker is None:
        return False
    candidate = _make_candidate(run, running.task, leader)
    found = checker.check(candidate, name=leader.digest) if check_missing else checker.recorded_check(candidate)
    return found is not None and found.is_wrong


def _race_incumbents(
    running: TaskRun,
    open_engines: EngineFactory,
    retry_failed: bool,
    recovery: Recovery,
    check_missing: bool = False,
) -> SelectionResult:
    """Select by a race, without incumbents that compute wrong results; see `_exclude_wrong_results`."""
    goal, plan, losses = running.judge.goal, running.experiment.confirmation, recovery.losses
    states, external = _exclude_wrong_results(running, recovery, check_missing)
    incumbents: _IncumbentsByBudget = {}
    groups: dict[_GroupKey, list[str]] = {}
    for run in running.task.spec.runs:
        own = incumbents[run.name] = {}
        for budget, state in states.get(run.name, {}).items():
            leaders: tuple[Incumbent, ...] = (
                *state.best,
                *(external.get(run.name, {}).get(budget, ()) if state.best else ()),
            )
            kept = tuple(leader for leader in leaders if goal.loss_excess(losses.get(leader.digest, 0.0)) == 0)
            own[budget] = kept or leaders
            groups[run.name, budget] = [leader.digest for leader in own[budget]]
            # The main table has one of the incumbents of all seeds as a row.
            seeds = groups.setdefault((run.searcher.name, budget, "all seeds"), [])
            seeds += [digest for digest in groups[run.name, budget] if digest not in seeds]
    speedups: Mapping[str, float] = {}
    ranked, surviving_digests = incumbents, {}
    if goal.minimize == "latency":
        comparison = _make_comparison(running, incumbents)
        if len(comparison.rows) > 1:
            groups, speedups = select(
                comparison,
                groups,
                open_engines,
                running.observer,
                top_k=plan.top_k,
                retry_failed=retry_failed,
                is_time_up=lambda: running.limit is not None and not running.limit.allows_recovery,
            )
        elif plan.candidates > 1:  # else a log is of an earlier run with more
            speedups = median_speedups(read_comparison(running.folder / FINAL_SELECTION_LOG_NAME), FLOAT_ROW)
        ranked = {
            name: {
                budget: rank_finalists(leaders, groups[name, budget], speedups, losses)[: plan.top_k]
                for budget, leaders in budgets.items()
            }
            for name, budgets in incumbents.items()
        }
        surviving_digests = {(str(key[0]), int(key[1])): frozenset(left) for key, left in groups.items() if key[2:]}
    if running.checker is not None:  # the tables show the fastest wrong placement of a search that has no other
        for name, budgets in ranked.items():
            for budget in [budget for budget, leaders in budgets.items() if not leaders]:
                budgets[budget] = _states_by_search(running)[name][budget].best[:1]
    return SelectionResult(states=states, incumbents=ranked, speedups=speedups, surviving=surviving_digests)


def _exclude_wrong_results(
    running: TaskRun, recovery: Recovery, check_missing: bool
) -> tuple[_StatesByBudget, _ModelsByBudget]:
    """Return the states of the searches and their warm-start models, without models that compute wrong results.

    The next best placements replace wrong ones. The models of other tools compete from the budget at which a search
    evaluated their placements. There are none without a race, or with a bound, because these models have no scores.

    Args:
        check_missing: Whether incumbents that were never compared with their files are compared now.
    """
    goal, budgets = running.judge.goal, running.experiment.budget.evaluations
    raced = goal.minimize == "latency" and running.experiment.confirmation.candidates > 1
    bounded = goal.metric is not None and goal.max_drop is not None
    external: dict[str, dict[int, tuple[WarmStartModel, ...]]] = {}
    for run in running.searches if raced and not bounded else ():
        if models := warm_start_models(running.task, run.searcher):
            placed = {model.placement_digest for model in models}
            spent = evaluations_until_result(read_journal(running.journal(run)), placed)
            external[run.name] = {
                budget: tuple(model for model in models if spent.get(model.placement_digest, math.inf) <= budget)
                for budget in budgets
            }
    external |= {name: {max(budgets): models} for name, models in recovery.models.items()}
    wrong, seen, before = set[str](), set[str](), -1
    while len(wrong) > before:
        before, states = len(wrong), _states_by_search(running, wrong)
        for run in running.searches:
            leaders: list[Incumbent] = [leader for state in states[run.name].values() for leader in state.best]
            for leader in chain(leaders, *external.get(run.name, {}).values()):
                if leader.digest in seen:
                    continue
                seen.add(leader.digest)
                if _computes_wrong_result(running, run, leader, check_missing):
                    wrong.add(leader.digest)
    for models_by_budget in external.values():
        for budget, models in models_by_budget.items():
            models_by_budget[budget] = tuple(model for model in models if model.digest not in wrong)
    return states, external


def _states_by_search(running: TaskRun, without: Collection[str] = ()) -> _StatesByBudget:
    goal, plan = running.judge.goal, running.experiment.confirmation
    others = {"latency": plan.candidates, "pareto": MAX_FRONT_CANDIDATES}
    count = max(plan.top_k, others.get(goal.minimize, 1))
    budgets = running.experiment.budget.evaluations
    return {
        run.name: state_at_budgets(read_journal(running.journal(run)), goal, budgets, count, without)
        for run in running.searches
    }


def _make_comparison(running: TaskRun, incumbents: _IncumbentsByBudget) -> PairedComparison:
    """Return the paired comparison of all incumbents; one that several searches found is a single row."""
    task, rows, external = running.task, dict[str, TimedRow](), dict[str, str]()
    for run in task.spec.runs if running.experiment.confirmation.candidates > 1 else ():
        for leader in chain(*incumbents[run.name].values()):
            rows[leader.digest] = TimedRow(name=leader.digest, candidate=_make_candidate(run, task, leader))
            if isinstance(leader, WarmStartModel):
                external[leader.digest] = digest_file(leader.path)
    header = {
        "model_sha256": digest_file(task.model_file),
        "rows": sorted(rows),
        **({"told": external} if external else {}),  # the digest of a placement determines its file
        "heats": list(TURNS_PER_RACING_ROUND),
        "samples": SAMPLES_PER_TURN,
        "group": MAX_GROUP_ROWS,
        "backend": dict(running.engines.describe()),
    }
    return PairedComparison(
        name="final selection",
        path=running.folder / FINAL_SELECTION_LOG_NAME,
        header=header,
        baseline=TimedRow(name=FLOAT_ROW, candidate=task.candidate(task.space.float_placement())),
        rows=tuple(rows.values()),
        schedule=FIRST_SCHEDULE,
        noise_floor=running.noise_floor,
    )


def _make_candidate(run: SearchSpec, task: Task, leader: Incumbent) -> Candidate:
    """Return the candidate of an incumbent of a search."""
    if isinstance(leader, WarmStartModel):
        file = task.runtime_input_file(leader.path)
        return Candidate(digest=digest_file(file)[:16], edges=(), source=lambda: file)
    if not is_external_searcher(run.searcher):
        return task_for_method(task, run.searcher).candidate(Placement(leader.choices))
    path = external_searcher_model_path(run, task, leader.digest)
    return Candidate(digest=leader.digest, edges=(), source=lambda: path)


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
