"""A made-up runtime whose truth is known, so that searchers, intervals and rankings can be checked.

Every quantized edge has an effect and so has every pair of them, drawn by hashing their names with a
seed. Wanted edges make the model faster, alone and more so in company; unwanted ones make it slower,
and more so beside wanted ones. So the planted optimum is: exactly the wanted edges.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from harness.api import Array, Artifact, Candidate
from harness.errors import BuildFailed, EvaluationFailed
from search.space import Edge, Resolved

__all__ = ["SimulatedBenchmarker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBenchmarker:
    """Latency by formula and noise by a seeded generator; never asks for a candidate's file.

    Args:
        seed: Of the landscape.
        base_ms: Latency without any Q/DQ pair.
        effect: Typical share of latency that one edge or pair is worth; 0 makes a flat landscape.
        wanted_share: Share of edges that are wanted.
        max_speedup: No placement reaches more than this, or less than its inverse.
        noise: Standard deviation of the logarithm of one reading around its build's latency.
        build_noise: The same of a build's latency around the truth.
        drift: Share by which latency grows from one reading to the next.
        failure_rate: Share of placements that cannot be built; the float model always can.
        noise_seed: Repeats the noise of a run; None draws new noise each time, as a real machine does.

    Raises:
        ValueError: An argument outside of its range.
    """

    seed: int = 0
    base_ms: float = 10.0
    effect: float = 0.05
    wanted_share: float = 0.5
    max_speedup: float = 4.0
    noise: float = 0.01
    build_noise: float = 0.0
    drift: float = 0.0
    failure_rate: float = 0.0
    noise_seed: int | None = None
    _builds: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    in_process = True
    """There is nothing to isolate, and a thousand evaluations a second leave no time for it."""
    dialect = "openvino"

    def __post_init__(self) -> None:
        for name in ("effect", "noise", "build_noise", "drift"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: 0 or more, but got {getattr(self, name)}")
        for name in ("wanted_share", "failure_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: 0 to 1, but got {getattr(self, name)}")
        if self.base_ms <= 0 or self.max_speedup <= 1:
            raise ValueError(f"base_ms above 0 and max_speedup above 1, but got {self.base_ms} and {self.max_speedup}")

    def truth_ms(self, edges: Resolved) -> float:
        """Latency of a placement without noise."""
        keys = np.array([self._hash(f"{edge}{precision}") for edge, precision in edges], dtype=np.uint64)
        wanted = _uniform(keys) < self.wanted_share
        alone = np.where(wanted, -1.0, 1.0) * _uniform(keys, salt=1)
        first, second = np.triu_indices(len(keys), k=1)
        pairs = keys[first] ^ keys[second]
        # A tenth of the pairs know each other; a known pair helps only where both are wanted.
        known = _uniform(pairs, salt=2) < 0.1
        together = np.where(wanted[first] & wanted[second], -1.0, 1.0) * known * _uniform(pairs, salt=3)
        shift = self.effect * float(alone.sum() + together.sum())
        limit = np.log(self.max_speedup)
        return float(self.base_ms * np.exp(limit * shift / (limit + abs(shift))))

    def wanted(self, edge: Edge, precision: str) -> bool:
        """Whether the planted optimum quantizes this edge so (one precision beside float is assumed)."""
        key = np.array([self._hash(f"{edge}{precision}")], dtype=np.uint64)
        return bool(_uniform(key)[0] < self.wanted_share)

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """The truth with this build's own noise.

        Raises:
            BuildFailed: The placement is one of those that fail.
        """
        lot = _uniform(np.array([self._hash(f"failure {candidate.digest}")], dtype=np.uint64))[0]
        if candidate.edges and lot < self.failure_rate:
            raise BuildFailed(f"the simulated runtime refuses placement {candidate.digest}")
        own = None if self.noise_seed is None else [self.noise_seed, self._hash(candidate.digest), next(self._builds)]
        rng = np.random.default_rng(own)
        truth_ms = self.truth_ms(candidate.edges)
        built_ms = truth_ms * float(np.exp(self.build_noise * rng.standard_normal()))
        return Artifact(engine=_Probe(built_ms, self.noise, self.drift, rng), info={"truth_ms": truth_ms})

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[_Probe]:
        """The probe that `build` made."""
        yield artifact.engine

    def describe(self) -> Mapping[str, Any]:
        """Name, version, device and the options that define the landscape."""
        options = {option.name: getattr(self, option.name) for option in fields(self) if option.init}
        facts = {"name": "simulated", "version": "1", "device": "simulated", "float_precision": "f32"}
        return {**facts, "options": options}

    def _hash(self, text: str) -> int:
        return int.from_bytes(hashlib.blake2b(f"{self.seed} {text}".encode(), digest_size=8).digest(), "little")


class _Probe:
    """Readings around one build's latency."""

    def __init__(self, latency_ms: float, noise: float, drift: float, rng: np.random.Generator) -> None:
        self._latency_ms = latency_ms
        self._noise = noise
        self._drift = drift
        self._rng = rng
        self._taken = 0

    def sample(self, n: int) -> Sequence[float]:
        """Draw n readings."""
        growth = 1 + self._drift * np.arange(self._taken, self._taken + n)
        self._taken += n
        readings: list[float] = (
            self._latency_ms * growth * np.exp(self._noise * self._rng.standard_normal(n))
        ).tolist()
        return readings

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Refused: there is no model behind a simulation."""
        raise EvaluationFailed("the simulated benchmarker has latencies only, no outputs that could be scored")


def _uniform(keys: np.ndarray[Any, np.dtype[np.uint64]], salt: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Numbers in [0, 1) from 64-bit keys, by the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = keys + np.uint64((salt * 0x9E3779B97F4A7C15) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) / 2.0**64
