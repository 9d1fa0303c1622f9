"""Set-up of a method in a task: a searcher, an ablated searcher, or a search by another tool."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import registry
from harness.api import Candidate, ExternalSearchTask
from harness.config.plan import SearchSpec
from harness.config.sections import SearcherSpec
from harness.errors import BuildFailed
from harness.external_searchers.adapter import ExternalSearcherAdapter, external_model_path
from harness.graph.qdq.read_edges import precisions_in
from harness.graph.qdq.space import build_space
from harness.paths import resolve_path
from harness.records import Failed
from harness.search_loop.loop import Seed
from harness.task_setup.task import Cell
from harness.timing.workers.in_process import as_outcome
from search.api import Searcher
from search.space import Placement, Space

__all__ = ["Search", "ToldModel", "is_peer", "open_search", "peer_model", "seen_by", "told_models"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What the engine runs of a method; a peer brings a space and candidates of its own.

    Attributes:
        searcher: Or how its making failed.
    """

    space: Space
    searcher: Searcher | Failed
    seeds: tuple[Seed, ...]
    candidate: Callable[[Placement], Candidate]

    @property
    def left(self) -> Failed | None:
        """What a peer raised as it was left; known once the search is closed."""
        return self.searcher.left if isinstance(self.searcher, ExternalSearcherAdapter) else None


def is_peer(method: SearcherSpec) -> bool:
    """Whether a method brings models of its own.

    Raises:
        UserError: No searcher and no peer is called so.
    """
    return registry.plugin_kind(method.use, ("searcher", "peer")) == "peer"


def seen_by(cell: Cell, method: SearcherSpec) -> Cell:
    """The cell as a method sees it: what is searched, with the seeds that lie in it.

    Or, as far as the method has to do without, no seeds, or a choice for each region by itself.
    """
    space = cell.searched
    seeds = () if "seeds" in method.without else tuple(s for s in cell.seeds if _within(s.placement, space))
    if "sharing" in method.without:
        edges = [dict(space.resolve(seed.placement)) for seed in seeds]
        space = _unshared(cell, space)
        seeds = tuple(replace(s, placement=space.nearest(e)) for s, e in zip(seeds, edges, strict=True))
    return replace(cell, space=space, seeds=seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldModel:
    """A Q/DQ model whose placement a method is told first, in the form that another tool gave it.

    Attributes:
        digest: What its row is called, the name of the start; a placement's row is called by its digest.
        told_as: Digest of the placement that the method is told.
        path: The tool's file.
    """

    digest: str
    told_as: str
    path: Path
    pairs: int


def told_models(cell: Cell, method: SearcherSpec) -> tuple[ToldModel, ...]:
    """Those of a method that have a speed on the device and are of the cell's precisions; a peer is told none."""
    if is_peer(method):
        return ()
    precisions = set(cell.spec.precisions) - cell.accuracy_only
    own = seen_by(cell, method)
    told = {seed.name: own.space.digest(seed.placement) for seed in own.seeds}
    return tuple(
        ToldModel(digest=foreign.name, told_as=told[foreign.name], path=foreign.path, pairs=foreign.pairs)
        for foreign in cell.foreign.values()
        if foreign.name in told and foreign.path and precisions_in(foreign.path) <= precisions
    )


@contextmanager
def open_search(run: SearchSpec, cell: Cell, keep: int) -> Iterator[Search]:
    """A method that is ready to search.

    Args:
        keep: How many of its best placements may be confirmed.
    """
    if is_peer(run.searcher):
        with _open_peer(run, cell, keep) as search:
            yield search
        return
    make: Any = registry.load_plugin("searcher", run.searcher.use)
    own = seen_by(cell, run.searcher)
    searcher: Searcher | Failed = as_outcome("search", lambda: make(own.space, seed=run.seed, **run.searcher.params))
    yield Search(space=own.space, searcher=searcher, seeds=own.seeds, candidate=own.candidate)


def peer_model(run: SearchSpec, cell: Cell, digest: str) -> Path:
    """The file of a model that a peer brought and that was among its best."""
    return external_model_path(_folder(run, cell) / "models", digest)


@contextmanager
def _open_peer(run: SearchSpec, cell: Cell, keep: int) -> Iterator[Search]:
    folder = _folder(run, cell)
    make: Any = registry.load_plugin("peer", run.searcher.use)
    task = ExternalSearchTask(
        model=cell.float_file,
        workdir=folder / "work",
        precision=cell.spec.precisions[0],
        seed=run.seed,
        find=lambda name: _found(name, run, cell),
    )
    try:
        with ExternalSearcherAdapter(lambda: make(task, **run.searcher.params), folder / "models", keep) as peer:
            yield Search(space=peer.space, searcher=peer, seeds=(), candidate=peer.candidate)
    finally:
        shutil.rmtree(task.workdir, ignore_errors=True)


def _folder(run: SearchSpec, cell: Cell) -> Path:
    return cell.work / "peers" / run.name


def _found(name: str, run: SearchSpec, cell: Cell) -> Path:
    foreign = cell.foreign.get(name)
    if foreign is None:
        return resolve_path(name, run.searcher.base_dir)
    if foreign.path is None:
        raise BuildFailed(f"{name} made no model: {foreign.reason}")
    return foreign.path


def _within(placement: Placement, space: Space) -> bool:
    return all(choice < size for choice, size in zip(placement.choices, space.sizes, strict=True))


def _unshared(cell: Cell, space: Space) -> Space:
    """The edges and precisions of a space with a choice for each region of a pattern."""
    precisions = tuple(dict.fromkeys(name for dimension in space.dimensions for name in dimension.choices[1:]))
    allowed = {edge for dimension in space.dimensions for edge in dimension.edges}
    finer = build_space(cell.model, cell.dialect, precisions=precisions, sharing="region")
    kept = ((d, tuple(edge for edge in d.edges if edge in allowed)) for d in finer.dimensions)
    return Space(tuple(replace(dimension, edges=edges) for dimension, edges in kept if edges))
