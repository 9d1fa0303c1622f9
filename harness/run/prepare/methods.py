"""Set-up of a searcher in a task: with all its inputs, with ablations, or as an external searcher."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.base.errors import BuildFailed
from harness.base.paths import resolve_path
from harness.config.experiment import SearchSpec
from harness.config.sections import SearcherSpec
from harness.graph.qdq.qdq_graph import read_precisions
from harness.graph.qdq.space import build_space
from harness.measure.records import Failed
from harness.plugins import registry
from harness.plugins.api import Candidate, ExternalSearchTask
from harness.run.prepare.task import Task
from harness.run.search.external.adapter import ExternalSearcherAdapter, external_model_path
from harness.run.search.loop import InitialPlacement
from harness.workers.engines import as_outcome
from search.api import Searcher
from search.space import Placement, Space


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSetup:
    """Searcher with its space and candidates; an external searcher has another space than the task.

    Attributes:
        searcher: The searcher, or the failure of its constructor.
        candidate: Function that returns the candidate of a placement.
    """

    space: Space
    searcher: Searcher | Failed
    initial_design: tuple[InitialPlacement, ...]
    candidate: Callable[[Placement], Candidate]

    @property
    def close_error(self) -> Failed | None:
        """Return the error that an external searcher raised when it was closed, or None."""
        return self.searcher.left if isinstance(self.searcher, ExternalSearcherAdapter) else None


def is_external_searcher(method: SearcherSpec) -> bool:
    """Return whether a method is an external searcher, which proposes model files instead of placements.

    Raises:
        UserError: No searcher has this name.
    """
    return registry.plugin_kind(method.use, ("searcher", "external searcher")) == "external searcher"


def task_for_method(task: Task, method: SearcherSpec) -> Task:
    """Return the task for a method, without the parts that its ablations (`without`) remove.

    These are the initial placements, and the sharing of schemes by regions of a pattern.
    """
    space = task.searched_space
    offered = () if "initial" in method.without else task.initial_design
    design = tuple(each for each in offered if _restrict_placement(each.placement, space))
    if "sharing" in method.without:
        edges = [dict(space.resolve(each.placement)) for each in design]
        space = _without_sharing(task, space)
        design = tuple(replace(s, placement=space.nearest(e)) for s, e in zip(design, edges, strict=True))
    return replace(task, space=space, initial_design=design)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartModel:
    """Q/DQ model of another tool, whose placement is in the initial design of a search.

    Attributes:
        digest: Name of the row: the name of the initial placement, because the model has other pairs than a placement.
        placement_digest: Digest of the placement that was read from the model.
        pairs: Number of Q/DQ pairs of the model.
    """

    digest: str
    placement_digest: str
    path: Path
    pairs: int


def warm_start_models(task: Task, method: SearcherSpec) -> tuple[WarmStartModel, ...]:
    """Return the models in a search's initial design whose precisions are not emulated; none for an external searcher.

    Args:
        method: Searcher of the search.
    """
    if is_external_searcher(method):
        return ()
    precisions = set(task.spec.precisions) - task.accuracy_only
    own = task_for_method(task, method)
    known = {seed.name: own.space.digest(seed.placement) for seed in own.initial_design}
    return tuple(
        WarmStartModel(
            digest=external.name, placement_digest=known[external.name], path=external.path, pairs=external.pairs
        )
        for external in task.external_models.values()
        if external.name in known and external.path and read_precisions(external.path) <= precisions
    )


@contextmanager
def open_search(run: SearchSpec, task: Task, keep: int) -> Iterator[SearchSetup]:
    """Yield the searcher of a search with its space and candidates, and close it on exit.

    Args:
        run: Searcher and seed.
        task: Task of the search.
        keep: Largest number of confirmed placements, whose files an external searcher must keep.
    """
    if is_external_searcher(run.searcher):
        with _open_external_searcher(run, task, keep) as search:
            yield search
        return
    make: Any = registry.load_plugin("searcher", run.searcher.use)
    own = task_for_method(task, run.searcher)
    searcher: Searcher | Failed = as_outcome("search", lambda: make(own.space, seed=run.seed, **run.searcher.params))
    yield SearchSetup(space=own.space, searcher=searcher, initial_design=own.initial_design, candidate=own.candidate)


def external_searcher_model_path(run: SearchSpec, task: Task, digest: str) -> Path:
    """Return the stored file of a model of an external searcher."""
    return external_model_path(_external_searcher_folder(run, task) / "models", digest)


@contextmanager
def _open_external_searcher(run: SearchSpec, task: Task, keep: int) -> Iterator[SearchSetup]:
    folder = _external_searcher_folder(run, task)
    make: Any = registry.load_plugin("external searcher", run.searcher.use)
    search_task = ExternalSearchTask(
        model=task.float_file,
        workdir=folder / "work",
        precision=task.spec.precisions[0],
        seed=run.seed,
        find=lambda name: _load_external_searcher(name, run, task),
    )
    try:
        with ExternalSearcherAdapter(
            lambda: make(search_task, **run.searcher.params), folder / "models", keep
        ) as adapter:
            yield SearchSetup(space=adapter.space, searcher=adapter, initial_design=(), candidate=adapter.candidate)
    finally:
        shutil.rmtree(search_task.workdir, ignore_errors=True)


def _external_searcher_folder(run: SearchSpec, task: Task) -> Path:
    return task.work / "external" / run.name


def _load_external_searcher(name: str, run: SearchSpec, task: Task) -> Path:
    external = task.external_models.get(name)
    if external is None:
        return resolve_path(name, run.searcher.base_dir)
    if external.path is None:
        raise BuildFailed(f"{name} made no model: {external.reason}")
    return external.path


def _restrict_placement(placement: Placement, space: Space) -> bool:
    return all(choice < size for choice, size in zip(placement.choices, space.sizes, strict=True))


def _without_sharing(task: Task, space: Space) -> Space:
    """Return the space with the same edges and precisions, but a separate choice for each region of a pattern."""
    precisions = tuple(dict.fromkeys(name for dimension in space.dimensions for name in dimension.choices[1:]))
    allowed = {edge for dimension in space.dimensions for edge in dimension.edges}
    finer = build_space(task.model, task.dialect, precisions=precisions, sharing="region")
    kept = ((d, tuple(edge for edge in d.edges if edge in allowed)) for d in finer.dimensions)
    return space.with_dimensions(tuple(replace(dimension, edges=edges) for dimension, edges in kept if edges))
