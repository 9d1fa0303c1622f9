"""Tables without a runtime: a made-up space, latencies by formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.measure.records import Failed, Measured, Outcome
from harness.runtimes.replay import (
    BenchmarkTable,
    TableEntry,
    TableMetadata,
    TableSubspace,
    read_table,
    write_table,
)
from search.space import Placement, Space
from search.synthetic_problem import synthetic_space

SPACE = Space(synthetic_space(8, groups=2, seed=3).dimensions)
EFFECTS = np.array([-0.4, 0.3, -0.2, 0.1, -0.05, 0.02])


def log_latency(choices: tuple[int, ...]) -> float:
    """Of the first six dimensions; additive, and one pair that helps only together."""
    on = np.array(choices[: len(EFFECTS)]) > 0
    return math.log(10.0) + float(EFFECTS[: len(on)] @ on) - 0.4 * float(on[0] and on[1])


def outcomes_of(
    latency_ms: Callable[..., float | None], **metrics: Callable[..., float]
) -> Callable[[tuple[int, ...]], Outcome]:
    """Return the outcomes of a table by functions of the first two choices; None is a failure."""

    def outcome(choices: tuple[int, ...]) -> Outcome:
        ms = latency_ms(*choices[:2])
        if ms is None:
            return Failed(stage="crash", reason="the worker died", wall_s=3.0)
        values = {name: value(*choices[:2]) for name, value in metrics.items()}
        return Measured(samples_ms=(ms,) * 7, build_s=1.0, measure_s=0.5, metrics=values)

    return outcome


def facts_of(space: Space, varied: tuple[int, ...], base: Placement, /, **changes: Any) -> TableMetadata:
    described: dict[str, Any] = {
        "model": "made-up",
        "source": "made-up.onnx",
        "model_sha256": "0" * 64,
        "dimensions": space.dimensions,
        "varied": tuple(space.dimensions[index].name for index in varied),
        "base": base.choices,
        "anchors": {"float": space.float_placement().choices, "all": space.quantize_all().choices},
        "sensitivity": dict.fromkeys((d.name for d in space.dimensions), 0.1),
        "precision": "int8",
        "dialect": "openvino",
        "backend": {"name": "openvino", "version": "1", "device": "a CPU", "options": {}, "float_precision": "f32"},
        "calibrated_on": "random data",
        "ranges": "0" * 16,
        "sampling": {},
        "environment": {},
    }
    return TableMetadata(**{**described, **changes})


def save_table(
    path: Path,
    dimensions: int = 6,
    *,
    outcome: Callable[[tuple[int, ...]], Outcome] | None = None,
    noise: float = 0.0,
    rows: Callable[[dict[str, TableEntry]], dict[str, TableEntry]] = lambda rows: rows,
    **changes: Any,
) -> BenchmarkTable:
    """Write a table of `dimensions` of 8 dimensions; `outcome` gives what became of a full placement's choices."""
    whole = SPACE
    subspace = TableSubspace(whole, tuple(range(dimensions)), whole.float_placement())
    rng = np.random.default_rng(0)

    def plain(choices: tuple[int, ...]) -> Outcome:
        samples = np.exp(log_latency(choices) + noise * rng.standard_normal(7))
        return Measured(samples_ms=tuple(samples.tolist()), build_s=0.5, measure_s=0.1, metrics={"sqnr_db": 20.0})

    anchors = [whole.float_placement(), whole.quantize_all()]
    listed = [*anchors, *(subspace.to_full_space(placement) for placement in subspace.placements())]
    made: dict[str, TableEntry] = {}
    for placement in listed:
        made.setdefault(
            whole.digest(placement),
            TableEntry(number=len(made), choices=placement.choices, outcome=(outcome or plain)(placement.choices)),
        )
    write_table(path, facts_of(whole, subspace.varied, subspace.base, **changes), rows(made))
    return read_table(path)


@pytest.fixture
def make_table(tmp_path: Path) -> Callable[..., BenchmarkTable]:
    """`save_table` with a file of the test's folder as its default."""

    def make(dimensions: int = 6, *, path: Path = tmp_path / "made-up.parquet", **changes: Any) -> BenchmarkTable:
        return save_table(path, dimensions, **changes)

    return make
