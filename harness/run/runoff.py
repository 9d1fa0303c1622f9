"""The runoff: the best placements of each search meet, built afresh, before one of them is its choice.

The lowest of a hundred noisy readings is a lucky one, and what is confirmed then is luck's choice. So the few that lead
are timed in turns with the float model, those that stay close for longer, and these readings alone choose. What tables
say of the chosen comes from the confirmation, whose readings are others. (Boesel, Nelson and Kim, "Using ranking and
selection to 'clean up' after simulation optimization", Operations Research 51, 2003; irace has a postselection race.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from harness.api import Candidate
from harness.graph.files import file_digest
from harness.measure.confirm import GROUP, Row
from harness.measure.engines import Engines
from harness.measure.race import HEATS
from harness.run.compose import Cell
from harness.run.contest import RUNOFF, Contest, read_speedups
from harness.run.heats import FIRST, TURN, race
from harness.run.journal import read_journal
from harness.run.methods import is_peer, peer_model, seen_by
from harness.run.plan import RunSpec
from harness.run.readback import Evaluated, Reached, reached
from harness.run.rows import FLOAT_ROW
from harness.run.running import Running
from search.space import Placement

__all__ = ["Found", "run_off"]

FRONT = 8
"""Placements of a front that are confirmed at most, unless more are asked for."""
_Lot = tuple[str | int, ...]
_Budgets = Mapping[str, Mapping[int, Reached]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the searches of a cell came to.

    Attributes:
        reached: How far each came, by its name, at each budget; nothing of a cell without a search.
        speedups: Over the float model in the runoff, by digest; empty where there was none.
        unbeaten: Digests that no other seed's leader has beaten in it, by name of the searcher and budget.
    """

    reached: _Budgets
    speedups: Mapping[str, float] = field(default_factory=dict)
    unbeaten: Mapping[tuple[str, int], Collection[str]] = field(default_factory=dict)


def run_off(
    running: Running, open_engines: Callable[[], AbstractContextManager[Engines]], retry_failed: bool = False
) -> Found:
    """How far each search of a cell came, with as many leaders as are confirmed, best first.

    Its turns are kept in `runoff.jsonl`, so that a cell that goes on has the same winners.

    Args:
        retry_failed: Try once more what failed in it.

    Raises:
        UserError: The float model fails, or the record cannot be written.
    """
    found = _searched(running)
    if running.judge.goal.minimize != "latency":
        return Found(reached=found)
    contest = _contest(running, found)
    contested = running.experiment.confirmation.contenders > 1  # else a record is of an experiment that had more
    own: dict[_Lot, list[str]] = {
        (name, budget): [trial.digest for trial in there.leaders]
        for name, budgets in found.items()
        for budget, there in budgets.items()
    }
    shared = _shared(running, found)
    lots = own | shared
    if len(contest.rows) > 1:
        wanted = running.experiment.confirmation.top_k
        lots = race(contest, lots, wanted, open_engines, running.observer, retry_failed)
    speedups = read_speedups(contest.path, FLOAT_ROW) if contested else {}
    settled = {
        name: {budget: _settled(there, lots[name, budget], speedups, running) for budget, there in budgets.items()}
        for name, budgets in found.items()
    }
    unbeaten = {(str(key[0]), int(key[1])): frozenset(lots[key]) for key in shared}
    return Found(reached=settled, speedups=speedups, unbeaten=unbeaten)


def _shared(running: Running, found: _Budgets) -> dict[_Lot, list[str]]:
    """What each searcher leads with at a budget, all seeds together: of these one is its row in the main table."""
    lots: dict[_Lot, dict[str, None]] = {}
    for run in running.cell.spec.runs:
        for budget, there in found.get(run.name, {}).items():
            lot = lots.setdefault((run.searcher.name, budget, "all seeds"), {})
            lot.update(dict.fromkeys(trial.digest for trial in there.leaders))
    return {key: [*lot] for key, lot in lots.items()}


def _searched(running: Running) -> _Budgets:
    budgets, goal = running.experiment.budget.evaluations, running.judge.goal
    runs = running.cell.spec.runs if len(running.cell.searched) else ()
    journals = {run.name: running.folder / "runs" / f"{run.name}.jsonl" for run in runs}
    return {name: reached(read_journal(path), goal, budgets, _count(running)) for name, path in journals.items()}


def _count(running: Running) -> int:
    """How many leaders of a search are looked at."""
    confirmation = running.experiment.confirmation
    others = {"latency": confirmation.contenders, "pareto": FRONT}
    return max(confirmation.top_k, others.get(running.judge.goal.minimize, 1))


def _contest(running: Running, found: _Budgets) -> Contest:
    """Of all leaders; what two searches lead with is there once."""
    cell = running.cell
    runs = cell.spec.runs if running.experiment.confirmation.contenders > 1 else ()
    rows = {
        trial.digest: Row(name=trial.digest, candidate=candidate(trial))
        for run in runs
        if run.name in found
        for candidate in [_built_again(run, cell)]
        for there in found[run.name].values()
        for trial in there.leaders
    }
    header = {
        "model_sha256": file_digest(cell.model_file),
        "rows": sorted(rows),
        "heats": list(HEATS),
        "samples": TURN,
        "group": GROUP,
        "backend": dict(running.engines.describe()),
    }
    unquantized = cell.candidate(cell.space.float_placement())
    return Contest(
        name="runoff",
        path=running.folder / RUNOFF,
        header=header,
        baseline=Row(name=FLOAT_ROW, candidate=unquantized),
        rows=tuple(rows.values()),
        plan=FIRST,
        floor=running.floor,
    )


def _built_again(run: RunSpec, cell: Cell) -> Callable[[Evaluated], Candidate]:
    """What makes a search's candidates anew."""
    if not is_peer(run.searcher):
        own = seen_by(cell, run.searcher)
        return lambda trial: own.candidate(Placement(trial.choices))

    def brought(trial: Evaluated) -> Candidate:
        path = peer_model(run, cell, trial.digest)
        return Candidate(digest=trial.digest, edges=(), source=lambda: path)

    return brought


def _settled(there: Reached, close: Sequence[str], speedups: Mapping[str, float], running: Running) -> Reached:
    """The leaders in the order of the runoff, as far as there was one; whoever failed in it comes last."""
    ranked = sorted(there.leaders, key=lambda t: (t.digest not in close, -speedups.get(t.digest, 0.0)))
    return replace(there, leaders=tuple(ranked[: running.experiment.confirmation.top_k]))
