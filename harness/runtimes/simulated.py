"""Simulated runtime with known latencies, to check searchers, intervals and rankings.

Every quantized edge has an effect on latency, and so have pairs of edges; a hash of their names and a seed gives the
values. Wanted edges make the model faster, and pairs of them more so; other edges make it slower, and pairs with wanted
edges more so. So the optimum is known: exactly the wanted edges are quantized.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from harness.base.errors import BuildFailed, EvaluationFailed
from harness.plugins.api import Array, Artifact, Candidate, Capabilities
from search.space import Edge, Resolved

# Ranges of parameters, checked by `harness.plugins.registry.create_plugin`.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBenchmarker:
    """Benchmarker that computes latencies by a formula with seeded noise, for tests and studies; reads no model file.

    Args:
        seed: Seed of the effects of edges and pairs.
        base_ms: Latency in ms without any Q/DQ pair.
        effect: Typical share of the latency by which one edge or pair changes it; 0: none has an effect.
        wanted_share: Share of the edges that are wanted: a pair there makes the model faster.
        max_speedup: Limit of the speedup of any placement; its inverse is the limit of the slowdown.
        noise: Standard deviation of the logarithm of a reading around the latency of its build.
        build_noise: Standard deviation of the logarithm of a build's latency around that of its process.
        process_noise: Standard deviation of the logarithm of a factor for a whole process (an instance of this class).
        wander: Standard deviation of the logarithm of the machine's speed, which changes slowly and for all engines of
            a process alike.
        wander_readings: Number of readings after which the correlation of the machine's speed has fallen to 1/e.
        outliers: Share of the readings that are delayed, by an exponential time with a mean of `outlier_size` times the
            latency.
        outlier_size: Mean delay of outliers, as a multiple of the latency.
        warmup: Share by which the first reading of an engine is slower; the share falls by a tenth at each reading.
        drift: Share by which the latency grows from one reading to the next.
        failure_rate: Share of the placements that cannot be built; the float model always can.
        noise_seed: Seed of the noise; None: other noise in each run, as on a real machine.
    """

    seed: int = 0
    base_ms: Positive = 10.0
    effect: NonNegative = 0.05
    wanted_share: Share = 0.5
    max_speedup: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 4.0
    noise: NonNegative = 0.01
    build_noise: NonNegative = 0.0
    process_noise: NonNegative = 0.0
    wander: NonNegative = 0.0
    wander_readings: Positive = 100.0
    outliers: Share = 0.0
    outlier_size: NonNegative = 1.0
    warmup: NonNegative = 0.0
    drift: NonNegative = 0.0
    failure_rate: Share = 0.0
    noise_seed: int | None = None
    _builds: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)
    _machine: _MachineNoise = field(init=False, repr=False, compare=False)

    # Nothing to isolate; a worker process would limit the rate to far below a thousand evaluations per second.
    capabilities = Capabilities(dialect="openvino", in_process=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_machine", _MachineNoise(self))

    def truth_ms(self, edges: Resolved, shape: str = "") -> float:
        """Return the latency in ms of a placement without noise; effects differ between shapes ("": the only one)."""
        keys = np.array([self._hash(f"{shape}{edge}{precision}") for edge, precision in edges], dtype=np.uint64)
        wanted = _hash_to_unit_interval(keys) < self.wanted_share
        alone = np.where(wanted, -1.0, 1.0) * _hash_to_unit_interval(keys, salt=1)
        first, second = np.triu_indices(len(keys), k=1)
        pairs = keys[first] ^ keys[second]
        # A tenth of the pairs have an effect of their own, which is a gain only if both edges are wanted.
        known = _hash_to_unit_interval(pairs, salt=2) < 0.1
        together = np.where(wanted[first] & wanted[second], -1.0, 1.0) * known * _hash_to_unit_interval(pairs, salt=3)
        shift = self.effect * float(alone.sum() + together.sum())
        limit = np.log(self.max_speedup)
        return float(self.base_ms * np.exp(limit * shift / (limit + abs(shift))))

    def wanted(self, edge: Edge, precision: str) -> bool:
        """Return whether the known optimum quantizes this edge to this precision."""
        key = np.array([self._hash(f"{edge}{precision}")], dtype=np.uint64)
        return bool(_hash_to_unit_interval(key)[0] < self.wanted_share)

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Return an engine whose latency has the noise of a new build.

        Raises:
            BuildFailed: The placement is one of those that fail.
        """
        lot = _hash_to_unit_interval(np.array([self._hash(f"failure {candidate.digest}")], dtype=np.uint64))[0]
        if candidate.edges and lot < self.failure_rate:
            raise BuildFailed(f"the simulated runtime refuses placement {candidate.digest}")
        own = None if self.noise_seed is None else [self.noise_seed, self._hash(candidate.digest), next(self._builds)]
        rng = np.random.default_rng(own)
        truth_ms = self.truth_ms(candidate.edges, candidate.shape)
        built_ms = truth_ms * self._machine.process * float(np.exp(self.build_noise * rng.standard_normal()))
        return Artifact(engine=_SimulatedProbe(self, built_ms, self._machine, rng), info={"truth_ms": truth_ms})

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[_SimulatedProbe]:
        """Open the probe that `build` made."""
        yield artifact.engine

    def describe(self) -> Mapping[str, Any]:
        """Return name, version, device and the options that define the landscape."""
        options = {option.name: getattr(self, option.name) for option in fields(self) if option.init}
        facts = {"name": "simulated", "version": "1", "device": "simulated", "float_precision": "f32"}
        return {**facts, "options": options}

    def _hash(self, text: str) -> int:
        return int.from_bytes(hashlib.blake2b(f"{self.seed} {text}".encode(), digest_size=8).digest(), "little")


class _MachineNoise:
    """Noise that all engines of one process share: a constant factor, and a drifting speed."""

    def __init__(self, settings: SimulatedBenchmarker) -> None:
        self._settings = settings
        self._rng = np.random.default_rng(None if settings.noise_seed is None else [settings.noise_seed])
        self.process = float(np.exp(settings.process_noise * self._rng.standard_normal()))
        self._state = float(self._rng.standard_normal())

    def next_factors(self, n: int) -> float:
        """Return the factor for the next n readings: a first-order autoregressive process, constant within a call."""
        if not self._settings.wander:
            return 1.0
        kept = float(np.exp(-n / self._settings.wander_readings))
        self._state = kept * self._state + np.sqrt(1 - kept**2) * float(self._rng.standard_normal())
        return float(np.exp(self._settings.wander * self._state))


class _SimulatedProbe:
    """Probe that draws readings around the latency of one build."""

    def __init__(
        self, settings: SimulatedBenchmarker, latency_ms: float, machine: _MachineNoise, rng: np.random.Generator
    ) -> None:
        self._settings = settings
        self._latency_ms = latency_ms
        self._machine = machine
        self._rng = rng
        self._taken = 0

    def sample(self, n: int) -> Sequence[float]:
        """Draw n readings."""
        settings = self._settings
        growth: Any = self._machine.next_factors(n)
        if settings.drift or settings.warmup:
            place = np.arange(self._taken, self._taken + n)
            growth = (1 + settings.drift * place) * (1 + settings.warmup * 0.9**place) * growth
        self._taken += n
        values = self._latency_ms * growth * np.exp(settings.noise * self._rng.standard_normal(n))
        if settings.outliers:
            late = self._rng.random(n) < settings.outliers
            values += late * self._latency_ms * settings.outlier_size * self._rng.standard_exponential(n)
        readings: list[float] = values.tolist()
        return readings

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Raise, because a simulation has no model."""
        raise EvaluationFailed("the simulated benchmarker has only latencies, no outputs to score")


def _hash_to_unit_interval(
    keys: np.ndarray[Any, np.dtype[np.uint64]], salt: int = 0
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return numbers in [0, 1) from 64-bit keys, by splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = keys + np.uint64((salt * 0x9E3779B97F4A7C15) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) / 2.0**64
