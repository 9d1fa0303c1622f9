"""Latency cost of quantizing inputs that a placement leaves in float and another tool may quantize.

Latency does not depend on the values of scales, so these inputs get the scale of another tensor, and no calibration
data are needed. The models are only timed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.graph.io.files import copy_model
from harness.graph.qdq.reduce_model import write_with_edges
from harness.progress import Observer
from harness.shipping.bundle import generated_script
from harness.shipping.runtime_comparison import RUNS, run_in_turns, run_script_in
from harness.statistics import Interval, noise_floor_from_ratios, paired_ratio_ci, speedup_verdict
from search.space import Edge

COST_SOURCE = "measured: the shipped file with these inputs quantized too, in turns with it in fresh processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCost:
    """Cost of quantizing inputs that the placement leaves in float.

    Attributes:
        edges: Inputs that read one tensor, for which a tool has one pair; or all inputs.
        ratio: Latency with these inputs quantized over the latency of the shipped file.
        verdict: "slower", "tie" or "faster" than the shipped file; differences within the noise floor are ties.
        noise_floor: Relative gain of the shipped file over its own repetition.
    """

    edges: tuple[Edge, ...]
    ratio: Interval
    verdict: str
    noise_floor: float

    def __str__(self) -> str:
        low, value, high = (100 * (x - 1) for x in (self.ratio.low, self.ratio.value, self.ratio.high))
        floor = "" if self.verdict != "tie" else f", a tie (noise floor {100 * self.noise_floor:.1f} %)"
        return f"latency {value:+.1f} % [{low:+.1f}, {high:+.1f}]{floor}"


def measure_edge_costs(
    folder: Path, facts: Mapping[str, Any], edges: Sequence[Edge], observer: Observer, *, builds: int
) -> tuple[EdgeCost, ...]:
    """Measure the cost of the edges of each tensor and, if there are several tensors, of all edges together.

    Edges that the runtime cannot run quantized, such as computed indices, are left out.

    Args:
        facts: Content of its `ship.json`, see `harness.results_dir.deploy_folder.read_bundle`.
        edges: Inputs to quantize, see `harness.shipping.recipes.PlacementSummary.inexpressible`.
        observer: Receiver of the progress.
        builds: Number of fresh processes of each model.

    Raises:
        UserError: The runtime is not installed, or has no script.
    """
    with tempfile.TemporaryDirectory(prefix="qdq-costs-") as scratch, generated_script(folder, facts) as script:
        run = partial(run_script_in, sys.executable, script, facts, "--repeat", str(RUNS), "--model")
        shipped = copy_model(folder / str(facts["file"]), Path(scratch))
        runs = {name: partial(run, str(shipped)) for name in ("shipped", "twin")}
        runs["shipped"]()  # raises if the runtime is not installed
        groups = {}
        for number, group in enumerate(_group_edges(edges)):
            path = shipped.with_name(f"{number}.onnx")
            if write_with_edges(shipped, group, path):
                with suppress(UserError):
                    run(str(path))
                    groups[str(number)], runs[str(number)] = group, partial(run, str(path))
        found = run_in_turns(runs, builds, f"time {folder.name} with more inputs quantized", observer)
    latency_ms = {name: [float(run["latency_ms"]) for run in each] for name, each in found.items()}
    return tuple(_read_cost(group, latency_ms, name) for name, group in groups.items())


def _read_cost(edges: tuple[Edge, ...], latency_ms: Mapping[str, Sequence[float]], name: str) -> EdgeCost:
    ours, twin, changed = ([[value] for value in latency_ms[each]] for each in ("shipped", "twin", name))
    floor = noise_floor_from_ratios([a[0] / b[0] for a, b in zip(ours, twin, strict=True)])
    verdict = speedup_verdict(paired_ratio_ci(ours, changed), floor)
    return EdgeCost(edges=edges, ratio=paired_ratio_ci(changed, ours), verdict=verdict, noise_floor=floor)


def _group_edges(edges: Sequence[Edge]) -> Iterator[tuple[Edge, ...]]:
    """Yield the edges of each tensor, then all edges."""
    tensors = dict.fromkeys(edge.tensor for edge in edges)
    for tensor in tensors:
        yield tuple(edge for edge in edges if edge.tensor == tensor)
    if len(tensors) > 1:
        yield tuple(edges)
