"""Set-up of a searcher in a task: with all its inputs, with ablations, or as an external searcher."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from harness.base.errors import BuildFailed, CandidateError
from harness.base.paths import resolve_path
from harness.config.experiment import SearchSpec
from harness.config.sections import SearcherSpec
from harness.graph.io.digests import digest_file
from harness.graph.io.files import move_model
from harness.graph.qdq.qdq_graph import read_precisions
from harness.graph.qdq.space import build_space
from harness.measure.records import Failed
from harness.plugins import registry
from harness.plugins.api import Candidate, ExternalSearcher, ExternalSearchTask
from harness.run.prepare.task import Task
from harness.run.search.loop import SearchTask
from harness.workers.engines import as_outcome
from search.api import Failure, Observation, Score, Searcher
from search.space import Dimension, Placement, Resolved, Space

BROKEN_MODEL_DIGEST = "0" * 16
"""Digest of the candidate that reports the failure of an external searcher."""


@dataclass(frozen=True)
class ModelSequenceSpace(Space):
    """Space of models numbered in the order of their proposal, of which only the files are known.

    Attributes:
        digests: Digest of each model: the first 16 hexadecimal digits of its file's SHA-256.
    """

    dimensions: tuple[Dimension, ...] = ()
    digests: list[str] = field(default_factory=list)

    def add(self, digest: str) -> Placement:
        """Append a model and return its placement, the number of the model."""
        self.digests.append(digest)
        return Placement((len(self.digests) - 1,))

    def validate(self, placement: Placement) -> Placement:
        """Return the placement unchanged.

        Raises:
            ValueError: No model has this number.
        """
        if len(placement.choices) != 1 or not 0 <= placement.choices[0] < len(self.digests):
            raise ValueError(f"{len(self.digests)} models were delivered, and none is number {placement.choices}")
        return placement

    def resolve(self, placement: Placement) -> Resolved:
        """Return no edges: the quantization of an external searcher is in its file only."""
        return ()

    def digest(self, placement: Placement) -> str:
        """Return the digest of the model's file."""
        return self.digests[placement.choices[0]]


def external_model_path(folder: Path, digest: str) -> Path:
    """Return the path of the model with this digest, in a folder of its own because of external data."""
    return folder / digest / "model.onnx"


class ExternalSearcherAdapter:
    """Searcher that asks an external searcher for one model at a time; as a context manager it closes it.

    If the external searcher fails, the adapter proposes one last candidate whose build fails with the reason. The
    journal thus contains the reason, and other methods of the task continue.

    Args:
        make: Function that creates the external searcher; called and entered at the first `ask`.
        folder: Folder of the models that may still be needed.
        keep: Number of best models to keep; others are deleted once their result is reported.

    Attributes:
        space: Space of the proposed models.
        left: Failure of the external searcher on closing, or None.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[ExternalSearcher]], folder: Path, keep: int) -> None:
        self.space = ModelSequenceSpace()
        self.left: Failed | None = None
        self._make = make
        self._opened = ExitStack()
        self._external: ExternalSearcher | None = None
        self._folder = folder
        self._keep = keep
        self._waiting = False
        self._over = False
        self._reason = ""
        self._scores: dict[str, Score] = {}
        self._once_best: set[str] = set()

    def __enter__(self) -> Self:
        shutil.rmtree(self._folder, ignore_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        outcome = as_outcome("search", self._opened.close)
        self.left = outcome if isinstance(outcome, Failed) else None

    def ask(self, n: int) -> Sequence[Placement]:
        if not n or self._waiting or self._over:
            return []
        try:
            if self._external is None:
                self._external = self._opened.enter_context(self._make())
            path = self._external.ask()
        except CandidateError as error:
            self._over, self._reason = True, str(error)
            return [self.space.add(BROKEN_MODEL_DIGEST)]
        self._over = path is None
        if path is None:
            return []
        self._waiting = True
        digest = digest_file(path)[:16]
        move_model(path, external_model_path(self._folder, digest))
        return [self.space.add(digest)]

    def tell(self, observation: Observation) -> None:
        if not self._waiting or self._external is None:
            return  # the observation is of the candidate that reports a failure
        self._waiting = False
        outcome = observation.outcome
        if isinstance(outcome, Score):
            self._scores[observation.digest] = outcome
        best = sorted(self._scores, key=lambda digest: self._scores[digest].rank)[: self._keep]
        if observation.digest in best:
            self._once_best.add(observation.digest)
        elif observation.digest not in self._once_best:  # a model that was among the best before may be proposed again
            shutil.rmtree(external_model_path(self._folder, observation.digest).parent, ignore_errors=True)
        self._external.tell(None if isinstance(outcome, Failure) else outcome.objective)

    def candidate(self, placement: Placement) -> Candidate:
        """Return the model as a candidate."""
        digest = self.space.digest(placement)

        def source() -> Path:
            if digest == BROKEN_MODEL_DIGEST:
                raise BuildFailed(self._reason)
            path = external_model_path(self._folder, digest)
            if not path.exists():
                raise BuildFailed(
                    "the model of an external searcher is stored only while it may be the best, so it cannot "
                    "be built a second time"
                )
            return path

        return Candidate(digest=digest, edges=(), source=source)


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
    design = tuple(
        each
        for each in (() if "initial" in method.without else task.initial_design)
        if all(choice < size for choice, size in zip(each.placement.choices, space.sizes, strict=True))
    )
    if "sharing" in method.without:  # the same edges and precisions, but a separate choice for each region of a pattern
        edges = [dict(space.resolve(each.placement)) for each in design]
        precisions = tuple(dict.fromkeys(name for dimension in space.dimensions for name in dimension.choices[1:]))
        allowed = {edge for dimension in space.dimensions for edge in dimension.edges}
        finer = build_space(task.model, task.dialect, precisions=precisions, sharing="region")
        kept = ((d, tuple(edge for edge in d.edges if edge in allowed)) for d in finer.dimensions)
        space = space.with_dimensions(tuple(replace(dimension, edges=own) for dimension, own in kept if own))
        design = tuple(s._replace(placement=space.nearest(e)) for s, e in zip(design, edges, strict=True))
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
def open_search(run: SearchSpec, task: Task, keep: int) -> Iterator[SearchTask]:
    """Yield the searcher of a search with its space and candidates, without a budget, and close it on exit.

    An external searcher has another space than the task.

    Args:
        run: Searcher and seed.
        task: Task of the search.
        keep: Largest number of confirmed placements, whose files an external searcher must keep.
    """
    method = run.searcher
    if not is_external_searcher(method):
        make: Any = registry.load_plugin("searcher", method.use)
        own = task_for_method(task, method)
        searcher: Searcher | Failed = as_outcome("search", lambda: make(own.space, seed=run.seed, **method.params))
        yield SearchTask(
            space=own.space,
            searcher=searcher,
            initial_design=own.initial_design,
            candidate=own.candidate,
            evaluations=0,
        )
        return

    def find(name: str) -> Path:
        external = task.external_models.get(name)
        if external is None:
            return resolve_path(name, method.base_dir)
        if external.path is None:
            raise BuildFailed(f"{name} made no model: {external.reason}")
        return external.path

    folder = task.work / "external" / run.name
    make = registry.load_plugin("external searcher", method.use)
    search_task = ExternalSearchTask(
        model=task.float_file,
        workdir=folder / "work",
        precision=task.spec.precisions[0],
        seed=run.seed,
        find=find,
    )
    try:
        with ExternalSearcherAdapter(lambda: make(search_task, **method.params), folder / "models", keep) as adapter:
            yield SearchTask(
                space=adapter.space,
                searcher=adapter,
                initial_design=(),
                candidate=adapter.candidate,
                evaluations=0,
            )
    finally:
        shutil.rmtree(search_task.workdir, ignore_errors=True)


def external_searcher_model_path(run: SearchSpec, task: Task, digest: str) -> Path:
    """Return the stored file of a model of an external searcher."""
    return external_model_path(task.work / "external" / run.name / "models", digest)
