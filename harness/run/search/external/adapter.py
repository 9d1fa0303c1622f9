"""Adapter that runs an external searcher as a searcher: its k-th model is the placement (k,) of a separate space.

Journal, budget and trials are those of other searchers; a model that is proposed twice is measured once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from harness.base.errors import BuildFailed, CandidateError
from harness.graph.io.digests import digest_file
from harness.graph.io.files import move_model
from harness.measure.records import Failed
from harness.plugins.api import Candidate, ExternalSearcher
from harness.workers.engines import as_outcome
from search.api import Failure, Observation, Score
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
        return Candidate(digest=digest, edges=(), source=lambda: self._source(digest))

    def _source(self, digest: str) -> Path:
        if digest == BROKEN_MODEL_DIGEST:
            raise BuildFailed(self._reason)
        path = external_model_path(self._folder, digest)
        if not path.exists():
            raise BuildFailed(
                "the model of an external searcher is stored only while it may be the best, so it cannot "
                "be built a second time"
            )
        return path
