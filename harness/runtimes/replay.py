"""Benchmarker that takes its readings from a replay table instead of a device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from harness.base.errors import BuildFailed, CandidateError, EvaluationFailed, MeasureFailed
from harness.base.paths import resolve_path
from harness.measure.records import Failed
from harness.plugins.api import Array, Artifact, Candidate, Capabilities
from harness.runtimes.benchmark_table import read_table

ERROR_BY_STAGE: Mapping[str, type[CandidateError]] = {"measure": MeasureFailed, "evaluate": EvaluationFailed}


class ReplayBenchmarker:
    """Benchmarker that draws a placement's samples from recorded ones, instead of timing an engine.

    Args:
        table: Replay table, a file that `qdq bench record` wrote.
        noise_seed: Seed of the draws; None: other draws in each run, as on a real machine.
        base: Folder that a relative path starts from, which the harness sets; None: the working folder.

    Raises:
        UserError: The table does not exist or is damaged.
    """

    capabilities = Capabilities(in_process=True)

    def __init__(self, table: str | Path, noise_seed: int | None = None, base: str | Path | None = None) -> None:
        path = resolve_path(str(table), None if base is None else Path(base))
        self._table = read_table(path)
        self._sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        self._edges = {edge for dimension in self._table.metadata.dimensions for edge in dimension.edges}
        self._noise_seed = noise_seed
        self._rng = np.random.default_rng(noise_seed)
        self.capabilities = Capabilities(dialect=self._table.metadata.dialect, in_process=True)

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Return the recorded engine.

        Raises:
            BuildFailed: The table does not have the placement, or has a failure of its build.
            MeasureFailed, EvaluationFailed: The table has a failure of its timing or evaluation.
        """
        facts, row = self._table.metadata, self._table.rows.get(candidate.digest)
        foreign = next((edge for edge, _ in candidate.edges if edge not in self._edges), None)
        if foreign is not None:
            raise BuildFailed(
                f"table {self._table.path.name} is of another model: {facts.model} has no edge "
                f"{foreign.tensor!r} -> {foreign.consumer!r}; record one of this model with 'qdq bench record'"
            )
        if row is None:
            raise BuildFailed(
                f"placement {candidate.digest} is not in table {self._table.path.name}, which has the "
                f"{len(self._table.subspace)} placements of {len(facts.varied)} dimensions of {facts.model}; "
                "search that subspace with 'qdq bench replay'"
            )
        if isinstance(row.outcome, Failed):
            raise ERROR_BY_STAGE.get(row.outcome.stage, BuildFailed)(
                f"recorded {row.outcome.stage}: {row.outcome.reason}"
            )
        info = {**row.outcome.info, "build_s": row.outcome.build_s, "recorded": True}
        return Artifact(engine=_ReplayProbe(row.outcome.samples_ms, self._rng), info=info)

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[_ReplayProbe]:
        """Open the probe that `build` made."""
        yield artifact.engine

    def describe(self) -> Mapping[str, Any]:
        """Return the facts of the recorded backend, with the device that was measured, under the name "replay"."""
        backend = self._table.metadata.backend
        return {
            "name": "replay",
            "version": "1",
            "device": backend["device"],
            "options": {"table_sha256": self._sha256, "noise_seed": self._noise_seed, "recorded_on": backend},
            "float_precision": backend["float_precision"],
            "model_sha256": self._table.metadata.model_sha256,
        }


class _ReplayProbe:
    """Probe that draws readings from recorded samples."""

    def __init__(self, samples_ms: Sequence[float], rng: np.random.Generator) -> None:
        self._samples_ms = np.asarray(samples_ms)
        self._rng = rng

    def sample(self, n: int) -> Sequence[float]:
        """Draw n readings."""
        drawn: list[float] = self._rng.choice(self._samples_ms, size=n).tolist()
        return drawn

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Raise, because a recording has no engine."""
        raise EvaluationFailed("a replay has only recorded latencies, no outputs to score")
