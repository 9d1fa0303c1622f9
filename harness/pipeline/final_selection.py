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
from harness.graph.io.files import file_digest
from harness.pipeline.task_run import Running
from harness.results_dir.artifacts import FLOAT_ROW
from harness.results_dir.journal import read_journal
from harness.search_loop.journal_reader import BudgetState, Evaluation, evaluations_until_result, state_at_budgets
from harness.selection.paired_timing import RUNOFF, Contest, read_speedups
from harness.selection.racing import FIRST, TURN, race
from harness.task_setup.methods import ToldModel, is_peer, peer_model, seen_by, told_models
from harness.task_setup.task import Cell
from harness.timing.confirmation import MAX_GROUP_ROWS, Contender
from harness.timing.racing_test import TURNS_PER_RACING_ROUND
from harness.timing.workers.engines import Engines
from search.space import Placement

__all__ = ["Found", "Leader", "in_order", "run_off"]

FRONT = 8
"""Placements of a front that are confirmed at most, unless more are asked for."""
Leader = Evaluation | ToldModel
"""What a search may choose: something that it evaluated, or the very model that a start of it was taken from."""
_Lot = tuple[str | int, ...]
_Budgets = Mapping[str, Mapping[int, BudgetState]]
_Led = Mapping[str, Mapping[int, tuple[Leader, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the searches of a cell came to.

    Attributes:
        reached: How far each came, by its name, at each budget; nothing of a cell without a search.
        leaders: Of each what is confirmed, the winner of the runoff first.
        speedups: Over the float model in the runoff, by digest; empty where there was none.
        unbeaten: Digests that no other seed's leader has beaten in it, by name of the searcher and budget.
    """

    reached: _Budgets
    leaders: _Led
    speedups: Mapping[str, float] = field(default_factory=dict)
    unbeaten: Mapping[tuple[str, int], Collection[str]] = field(default_factory=dict)


def run_off(
    running: Running, open_engines: Callable[[], AbstractContextManager[Engines]], retry_failed: bool = False
) -> Found:
    """How far each search of a cell came, with as many leaders as are confirmed, best first.

    Its turns are kept in `runoff.jsonl`, so that a cell that goes on has the same winners. Where the result of a winner
    is wrong, all leaders are compared with their files and those that are right meet again.

    Args:
        retry_failed: Try once more what failed in it.

    Raises:
        UserError: The float model fails, or the record cannot be written.
    """
    found = _held(running, open_engines, retry_failed)
    chosen = [(run, found.leaders.get(run.name, {}).values()) for run in running.cell.spec.runs]
    if any(_is_wrong(running, run, leader) for run, led in chosen for leader in chain.from_iterable(led)):
        return _held(running, open_engines, retry_failed, look=True)
    return found


def _is_wrong(running: Running, run: SearchSpec, leader: Leader, look: bool = True) -> bool:
    """Return whether the runtime computes something else than a leader's file says; see `_right`."""
    if running.checker is None:
        return False
    candidate = _built_again(run, running.cell)(leader)
    found = running.checker.check(candidate, name=leader.digest) if look else running.checker.known(candidate)
    return found is not None and found.wrong


def _held(
    running: Running,
    open_engines: Callable[[], AbstractContextManager[Engines]],
    retry_failed: bool,
    look: bool = False,
) -> Found:
    """Hold the runoff; see `_right`."""
    found, told = _right(running, look)
    led: dict[str, dict[int, tuple[Leader, ...]]] = {
        run.name: {
            budget: (*there.best, *(told.get(run.name, {}).get(budget, ()) if there.best else ()))
            for budget, there in found.get(run.name, {}).items()
        }
        for run in running.cell.spec.runs
    }
    if running.judge.goal.minimize != "latency":
        return Found(reached=found, leaders=_shown(running, led))
    contest = _contest(running, led)
    contested = running.experiment.confirmation.contenders > 1  # else a record is of an experiment that had more
    own: dict[_Lot, list[str]] = {
        (name, budget): [leader.digest for leader in leaders]
        for name, budgets in led.items()
        for budget, leaders in budgets.items()
    }
    shared = _shared(running, led)
    lots = own | shared
    wanted = running.experiment.confirmation.top_k
    if len(contest.rows) > 1:
        lots = race(contest, lots, wanted, open_engines, running.observer, retry_failed)
    speedups = read_speedups(contest.path, FLOAT_ROW) if contested else {}
    settled = {
        name: {budget: in_order(leaders, lots[name, budget], speedups)[:wanted] for budget, leaders in budgets.items()}
        for name, budgets in led.items()
    }
    unbeaten = {(str(key[0]), int(key[1])): frozenset(lots[key]) for key in shared}
    return Found(reached=found, leaders=_shown(running, settled), speedups=speedups, unbeaten=unbeaten)


def _right(running: Running, look: bool) -> tuple[_Budgets, Mapping[str, Mapping[int, tuple[ToldModel, ...]]]]:
    """Return how far each search came and the models that it was told, without those that are known to be wrong.

    Leaders that are wrong give way to the next ones until none is.

    Args:
        look: Compare leaders with their files that were not compared before.
    """
    wrong, seen, told = set[str](), set[str](), _told(running)
    while True:
        found = _searched(running, wrong)
        before = len(wrong)
        for run in running.cell.spec.runs if found else ():
            leaders: list[Leader] = [leader for there in found[run.name].values() for leader in there.best]
            leaders += chain.from_iterable(told.get(run.name, {}).values())
            for leader in (each for each in leaders if each.digest not in seen):
                seen.add(leader.digest)
                if _is_wrong(running, run, leader, look):
                    wrong.add(leader.digest)
        if len(wrong) == before:
            break
    kept = {
        name: {budget: tuple(model for model in models if model.digest not in wrong) for budget, models in each.items()}
        for name, each in told.items()
    }
    return found, kept


def _shown(running: Running, led: _Led) -> _Led:
    """Return the leaders; a search whose every placement is wrong shows its fastest, which tables say is wrong."""
    if running.checker is None or all(leaders for budgets in led.values() for leaders in budgets.values()):
        return led
    found = _searched(running)
    return {
        name: {
            budget: leaders or (found[name][budget].best[:1] if name in found else ())
            for budget, leaders in budgets.items()
        }
        for name, budgets in led.items()
    }


def _told(running: Running) -> dict[str, dict[int, tuple[ToldModel, ...]]]:
    """The models that may be the choice of each search at each budget, for it has been told their placements by then.

    None where nothing is raced, or where there is a bound on accuracy: nobody has scored them.
    """
    goal, cell, budgets = running.judge.goal, running.cell, running.experiment.budget.evaluations
    raced = goal.minimize == "latency" and running.experiment.confirmation.contenders > 1
    if not raced or (goal.metric is not None and goal.max_drop is not None):
        return {}
    found: dict[str, dict[int, tuple[ToldModel, ...]]] = {}
    for run, journal in _journals(running):
        if models := told_models(cell, run.searcher):
            spent = evaluations_until_result(read_journal(journal), {model.told_as for model in models})
            found[run.name] = {
                budget: tuple(model for model in models if spent.get(model.told_as, math.inf) <= budget)
                for budget in budgets
            }
    return found


def _shared(running: Running, led: _Led) -> dict[_Lot, list[str]]:
    """What each searcher leads with at a budget, all seeds together: of these one is its row in the main table."""
    lots: dict[_Lot, dict[str, None]] = {}
    for run in running.cell.spec.runs:
        for budget, leaders in led[run.name].items():
            lot = lots.setdefault((run.searcher.name, budget, "all seeds"), {})
            lot.update(dict.fromkeys(leader.digest for leader in leaders))
    return {key: [*lot] for key, lot in lots.items()}


def _searched(running: Running, without: Collection[str] = ()) -> _Budgets:
    budgets, goal = running.experiment.budget.evaluations, running.judge.goal
    return {
        run.name: state_at_budgets(read_journal(journal), goal, budgets, _count(running), without)
        for run, journal in _journals(running)
    }


def _journals(running: Running) -> Iterator[tuple[SearchSpec, Path]]:
    """The searches with their journals; none where nothing is searched."""
    for run in running.cell.spec.runs if len(running.cell.searched) else ():
        yield run, running.folder / "runs" / f"{run.name}.jsonl"


def _count(running: Running) -> int:
    """How many leaders of a search are looked at."""
    confirmation = running.experiment.confirmation
    others = {"latency": confirmation.contenders, "pareto": FRONT}
    return max(confirmation.top_k, others.get(running.judge.goal.minimize, 1))


def _contest(running: Running, led: _Led) -> Contest:
    """Of all leaders; what two searches lead with is there once."""
    cell = running.cell
    contested = running.experiment.confirmation.contenders > 1
    runs = [run for run in cell.spec.runs if contested and led[run.name]]  # none where nothing is searched: emulated
    rows = {
        leader.digest: Contender(name=leader.digest, candidate=candidate(leader))
        for run in runs
        for candidate in [_built_again(run, cell)]
        for leaders in led[run.name].values()
        for leader in leaders
    }
    told = {
        leader.digest: file_digest(leader.path)
        for run in runs
        for leader in chain.from_iterable(led[run.name].values())
        if isinstance(leader, ToldModel)
    }
    header = {
        "model_sha256": file_digest(cell.model_file),
        "rows": sorted(rows),
        **({"told": told} if told else {}),  # a placement's digest says what is in its file
        "heats": list(TURNS_PER_RACING_ROUND),
        "samples": TURN,
        "group": MAX_GROUP_ROWS,
        "backend": dict(running.engines.describe()),
    }
    unquantized = cell.candidate(cell.space.float_placement())
    return Contest(
        name="runoff",
        path=running.folder / RUNOFF,
        header=header,
        baseline=Contender(name=FLOAT_ROW, candidate=unquantized),
        rows=tuple(rows.values()),
        plan=FIRST,
        floor=running.floor,
    )


def _built_again(run: SearchSpec, cell: Cell) -> Callable[[Leader], Candidate]:
    """What makes a search's candidates anew."""
    own = None if is_peer(run.searcher) else seen_by(cell, run.searcher)

    def built(leader: Leader) -> Candidate:
        if isinstance(leader, ToldModel):
            file = cell.parsed(leader.path)
            return Candidate(digest=file_digest(file)[:16], edges=(), source=lambda: file)
        if own is not None:
            return own.candidate(Placement(leader.choices))
        path = peer_model(run, cell, leader.digest)
        return Candidate(digest=leader.digest, edges=(), source=lambda: path)

    return built


def in_order(leaders: Sequence[Leader], close: Sequence[str], speedups: Mapping[str, float]) -> tuple[Leader, ...]:
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
                evaluated and isinstance(one, ToldModel),
                -speedups.get(one.digest, 0.0),
            ),
        )
    )
