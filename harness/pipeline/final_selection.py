"""Final selection: the best placements of each search are rebuilt and timed in turns before one is chosen.

The lowest of a hundred noisy readings is a lucky one, and what is confirmed then is luck's choice. So the few that lead
are timed in turns with the float model, those that stay close for longer, and these readings alone choose. What tables
say of the chosen comes from the confirmation, whose readings are others. (Boesel, Nelson and Kim, "Using ranking and
selection to 'clean up' after simulation optimization", Operations Research 51, 2003; irace has a postselection race.)

A search evaluates placements in the form of Q/DQ pairs that its runtime runs fastest as a rule. Where it was told the
placement of a model that another tool made, that model meets its best as it is: in its own form it may be faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from harness.api import Candidate
from harness.config.plan import SearchSpec
from harness.graph.io.files import digest_file
from harness.pipeline.task_run import TaskRun
from harness.results_dir.artifacts import FLOAT_ROW
from harness.results_dir.journal import read_journal
from harness.search_loop.journal_reader import BudgetState, Evaluation, evaluations_until_result, state_at_budgets
from harness.selection.paired_timing import SELECTION_LOG_NAME, PairedComparison, read_speedups
from harness.selection.racing import FIRST_SCHEDULE, SAMPLES_PER_TURN, run_race
from harness.task_setup.methods import (
    WarmStartModel,
    external_searcher_model_path,
    is_external_searcher,
    task_for_method,
    warm_start_models,
)
from harness.task_setup.task import Task
from harness.timing.confirmation import MAX_GROUP_ROWS, Contender
from harness.timing.racing_test import TURNS_PER_RACING_ROUND
from harness.timing.workers.engines import Engines
from search.space import Placement

__all__ = ["Incumbent", "SelectionResult", "rank_finalists", "select_final"]

MAX_FRONT_CANDIDATES = 8
"""Placements of a front that are confirmed at most, unless more are asked for."""
Incumbent = Evaluation | WarmStartModel
"""What a search may choose: something that it evaluated, or the very model that a start of it was taken from."""
_GroupKey = tuple[str | int, ...]
_StatesByBudget = Mapping[str, Mapping[int, BudgetState]]
_IncumbentsByBudget = Mapping[str, Mapping[int, tuple[Incumbent, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionResult:
    """What the searches of a cell came to.

    Attributes:
        states: How far each came, by its name, at each budget; nothing of a cell without a search.
        incumbents: Of each what is confirmed, the winner of the runoff first.
        speedups: Over the float model in the runoff, by digest; empty where there was none.
        surviving: Digests that no other seed's leader has beaten in it, by name of the searcher and budget.
    """

    states: _StatesByBudget
    incumbents: _IncumbentsByBudget
    speedups: Mapping[str, float] = field(default_factory=dict)
    surviving: Mapping[tuple[str, int], Collection[str]] = field(default_factory=dict)


def select_final(
    running: TaskRun, open_engines: Callable[[], AbstractContextManager[Engines]], retry_failed: bool = False
) -> SelectionResult:
    """How far each search of a cell came, with as many leaders as are confirmed, best first.

    Its turns are kept in `runoff.jsonl`, so that a cell that goes on has the same winners. Where the result of a winner
    is wrong, all leaders are compared with their files and those that are right meet again.

    Args:
        retry_failed: Try once more what failed in it.

    Raises:
        UserError: The float model fails, or the record cannot be written.
    """
    found = _race_incumbents(running, open_engines, retry_failed)
    chosen = [(run, found.incumbents.get(run.name, {}).values()) for run in running.task.spec.runs]
    if any(_computes_wrong_result(running, run, leader) for run, led in chosen for leader in chain.from_iterable(led)):
        return _race_incumbents(running, open_engines, retry_failed, look=True)
    return found


def _computes_wrong_result(running: TaskRun, run: SearchSpec, leader: Incumbent, look: bool = True) -> bool:
    """Return whether the runtime computes something else than a leader's file says; see `_exclude_wrong_results`."""
    if running.checker is None:
        return False
    candidate = _candidate_writer(run, running.task)(leader)
    found = running.checker.check(candidate, name=leader.digest) if look else running.checker.recorded_check(candidate)
    return found is not None and found.is_wrong


def _race_incumbents(
    running: TaskRun,
    open_engines: Callable[[], AbstractContextManager[Engines]],
    retry_failed: bool,
    look: bool = False,
) -> SelectionResult:
    """Hold the runoff; see `_exclude_wrong_results`."""
    found, told = _exclude_wrong_results(running, look)
    led: dict[str, dict[int, tuple[Incumbent, ...]]] = {
        run.name: {
            budget: (*there.best, *(told.get(run.name, {}).get(budget, ()) if there.best else ()))
            for budget, there in found.get(run.name, {}).items()
        }
        for run in running.task.spec.runs
    }
    if running.judge.goal.minimize != "latency":
        return SelectionResult(states=found, incumbents=_incumbents_or_fastest_wrong(running, led))
    contest = _make_comparison(running, led)
    contested = running.experiment.confirmation.contenders > 1  # else a record is of an experiment that had more
    own: dict[_GroupKey, list[str]] = {
        (name, budget): [leader.digest for leader in leaders]
        for name, budgets in led.items()
        for budget, leaders in budgets.items()
    }
    shared = _groups_by_searcher(running, led)
    lots = own | shared
    wanted = running.experiment.confirmation.top_k
    if len(contest.rows) > 1:
        lots = run_race(contest, lots, wanted, open_engines, running.observer, retry_failed)
    speedups = read_speedups(contest.path, FLOAT_ROW) if contested else {}
    settled = {
        name: {
            budget: rank_finalists(leaders, lots[name, budget], speedups)[:wanted]
            for budget, leaders in budgets.items()
        }
        for name, budgets in led.items()
    }
    unbeaten = {(str(key[0]), int(key[1])): frozenset(lots[key]) for key in shared}
    return SelectionResult(
        states=found, incumbents=_incumbents_or_fastest_wrong(running, settled), speedups=speedups, surviving=unbeaten
    )


def _exclude_wrong_results(
    running: TaskRun, look: bool
) -> tuple[_StatesByBudget, Mapping[str, Mapping[int, tuple[WarmStartModel, ...]]]]:
    """Return how far each search came and the models that it was told, without those that are known to be wrong.

    Leaders that are wrong give way to the next ones until none is.

    Args:
        look: Compare leaders with their files that were not compared before.
    """
    wrong, seen, told = set[str](), set[str](), _warm_start_models_by_budget(running)
    while True:
        found = _states_by_search(running, wrong)
        before = len(wrong)
        for run in running.task.spec.runs if found else ():
            leaders: list[Incumbent] = [leader for there in found[run.name].values() for leader in there.best]
            leaders += chain.from_iterable(told.get(run.name, {}).values())
            for leader in (each for each in leaders if each.digest not in seen):
                seen.add(leader.digest)
                if _computes_wrong_result(running, run, leader, look):
                    wrong.add(leader.digest)
        if len(wrong) == before:
            break
    kept = {
        name: {budget: tuple(model for model in models if model.digest not in wrong) for budget, models in each.items()}
        for name, each in told.items()
    }
    return found, kept


def _incumbents_or_fastest_wrong(running: TaskRun, led: _IncumbentsByBudget) -> _IncumbentsByBudget:
    """Return the leaders; a search whose every placement is wrong shows its fastest, which tables say is wrong."""
    if running.checker is None or all(leaders for budgets in led.values() for leaders in budgets.values()):
        return led
    found = _states_by_search(running)
    return {
        name: {
            budget: leaders or (found[name][budget].best[:1] if name in found else ())
            for budget, leaders in budgets.items()
        }
        for name, budgets in led.items()
    }


def _warm_start_models_by_budget(running: TaskRun) -> dict[str, dict[int, tuple[WarmStartModel, ...]]]:
    """The models that may be the choice of each search at each budget, for it has been told their placements by then.

    None where nothing is raced, or where there is a bound on accuracy: nobody has scored them.
    """
    goal, cell, budgets = running.judge.goal, running.task, running.experiment.budget.evaluations
    raced = goal.minimize == "latency" and running.experiment.confirmation.contenders > 1
    if not raced or (goal.metric is not None and goal.max_drop is not None):
        return {}
    found: dict[str, dict[int, tuple[WarmStartModel, ...]]] = {}
    for run, journal in _search_journals(running):
        if models := warm_start_models(cell, run.searcher):
            spent = evaluations_until_result(read_journal(journal), {model.placement_digest for model in models})
            found[run.name] = {
                budget: tuple(model for model in models if spent.get(model.placement_digest, math.inf) <= budget)
                for budget in budgets
            }
    return found


def _groups_by_searcher(running: TaskRun, led: _IncumbentsByBudget) -> dict[_GroupKey, list[str]]:
    """What each searcher leads with at a budget, all seeds together: of these one is its row in the main table."""
    lots: dict[_GroupKey, dict[str, None]] = {}
    for run in running.task.spec.runs:
        for budget, leaders in led[run.name].items():
            lot = lots.setdefault((run.searcher.name, budget, "all seeds"), {})
            lot.update(dict.fromkeys(leader.digest for leader in leaders))
    return {key: [*lot] for key, lot in lots.items()}


def _states_by_search(running: TaskRun, without: Collection[str] = ()) -> _StatesByBudget:
    budgets, goal = running.experiment.budget.evaluations, running.judge.goal
    return {
        run.name: state_at_budgets(read_journal(journal), goal, budgets, _incumbent_count(running), without)
        for run, journal in _search_journals(running)
    }


def _search_journals(running: TaskRun) -> Iterator[tuple[SearchSpec, Path]]:
    """The searches with their journals; none where nothing is searched."""
    for run in running.task.spec.runs if len(running.task.searched_space) else ():
        yield run, running.folder / "runs" / f"{run.name}.jsonl"


def _incumbent_count(running: TaskRun) -> int:
    """How many leaders of a search are looked at."""
    confirmation = running.experiment.confirmation
    others = {"latency": confirmation.contenders, "pareto": MAX_FRONT_CANDIDATES}
    return max(confirmation.top_k, others.get(running.judge.goal.minimize, 1))


def _make_comparison(running: TaskRun, led: _IncumbentsByBudget) -> PairedComparison:
    """Of all leaders; what two searches lead with is there once."""
    cell = running.task
    contested = running.experiment.confirmation.contenders > 1
    runs = [run for run in cell.spec.runs if contested and led[run.name]]  # none where nothing is searched: emulated
    rows = {
        leader.digest: Contender(name=leader.digest, candidate=candidate(leader))
        for run in runs
        for candidate in [_candidate_writer(run, cell)]
        for leaders in led[run.name].values()
        for leader in leaders
    }
    told = {
        leader.digest: digest_file(leader.path)
        for run in runs
        for leader in chain.from_iterable(led[run.name].values())
        if isinstance(leader, WarmStartModel)
    }
    header = {
        "model_sha256": digest_file(cell.model_file),
        "rows": sorted(rows),
        **({"told": told} if told else {}),  # a placement's digest says what is in its file
        "heats": list(TURNS_PER_RACING_ROUND),
        "samples": SAMPLES_PER_TURN,
        "group": MAX_GROUP_ROWS,
        "backend": dict(running.engines.describe()),
    }
    unquantized = cell.candidate(cell.space.float_placement())
    return PairedComparison(
        name="runoff",
        path=running.folder / SELECTION_LOG_NAME,
        header=header,
        baseline=Contender(name=FLOAT_ROW, candidate=unquantized),
        rows=tuple(rows.values()),
        schedule=FIRST_SCHEDULE,
        floor=running.floor,
    )


def _candidate_writer(run: SearchSpec, cell: Task) -> Callable[[Incumbent], Candidate]:
    """What makes a search's candidates anew."""
    own = None if is_external_searcher(run.searcher) else task_for_method(cell, run.searcher)

    def built(leader: Incumbent) -> Candidate:
        if isinstance(leader, WarmStartModel):
            file = cell.runtime_input_file(leader.path)
            return Candidate(digest=digest_file(file)[:16], edges=(), source=lambda: file)
        if own is not None:
            return own.candidate(Placement(leader.choices))
        path = external_searcher_model_path(run, cell, leader.digest)
        return Candidate(digest=leader.digest, edges=(), source=lambda: path)

    return built


def rank_finalists(
    leaders: Sequence[Incumbent], close: Sequence[str], speedups: Mapping[str, float]
) -> tuple[Incumbent, ...]:
    """The leaders in the order of the runoff, as far as there was one.

    Whoever failed in it comes last; a model of another tool, whose speed nobody has seen then, is left out. It is the
    choice where it beats all that was evaluated, not where it cannot be told from it: a placement can be explained.
    """
    evaluated = any(isinstance(leader, Evaluation) and leader.digest in close for leader in leaders)
    there = (leader for leader in leaders if isinstance(leader, Evaluation) or leader.digest in speedups)
    return tuple(
        sorted(
            there,
            key=lambda one: (
                one.digest not in close,
                evaluated and isinstance(one, WarmStartModel),
                -speedups.get(one.digest, 0.0),
            ),
        )
    )
