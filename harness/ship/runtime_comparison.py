"""Comparisons of a folder to deploy in fresh processes: of two Python environments, and with more inputs quantized.

The second gives the latency cost of inputs that a placement leaves in float and another tool may quantize. Latency does
not depend on the values of scales, so these inputs get the scale of another tensor, and no calibration data are needed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.metrics.closeness import MAX_SQNR_DB, output_sqnr
from harness.base.errors import DoesNotHold, UserError
from harness.base.progress import Observer
from harness.base.statistics import Interval, noise_floor_from_ratios, paired_ratio_ci, speedup_verdict
from harness.base.text import short_version
from harness.graph.io.files import copy_model
from harness.graph.protos import find_random_outputs
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.qdq.reduce_model import write_with_edges, write_without_pairs
from harness.plugins.api import Array
from harness.results.deploy_folder import read_bundle
from harness.ship.bundle import find_target, generated_script, run_script
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process
from harness.workers.locks import timing_lock
from search.space import Edge

BUILDS, RUNS = 5, 30
MIN_GAIN_SHARE = 0.5  # of the gain over the float model, below which the gain is gone
NARROW = 0.95  # lower limit of the ratio from which a tie needs no remark on a possible loss
MIN_SQNR_DB = 20.0  # between the outputs of two versions of a runtime, which may choose different INT8 kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeComparison:
    """Comparison of two environments that run the same file in turns, each time in a fresh process.

    Attributes:
        speedup: Latency in the first environment over that in the second.
        noise_floor: Relative gain of the first environment over its own repetition.
        verdict: "faster", "tie" or "slower": the second environment relative to the first.
        latencies_ms: Median latency in each environment.
        sqnr_db: SQNR between the outputs, in dB, of the output that agrees least; None if every output is random.
        versions: Version of the runtime in each environment; None if the runtime does not report it.
        recorded_version: Version of the runtime with which the file was measured.
        recorded_gain: Speedup over the float model in that measurement.
        gains: Speedup over the same file without its pairs in each environment; None if it has no pairs.
    """

    speedup: Interval
    noise_floor: float
    verdict: str
    latencies_ms: tuple[float, float]
    sqnr_db: float | None
    versions: tuple[str | None, str | None]
    recorded_version: str
    recorded_gain: Interval
    gains: tuple[Interval, Interval] | None

    @property
    def lost_gain(self) -> tuple[str, ...]:
        """Return the environments, of "this" and "other", that have lost over half of the gain over the float model.

        The gain before is that of an environment with the version of the measurement, else the recorded one. The
        intervals of both gains must not overlap.
        """
        if self.gains is None:
            return ()
        measured = [short_version(version) == short_version(self.recorded_version) for version in self.versions]
        before = self.gains[measured.index(True)] if any(measured) else self.recorded_gain
        least = 1 + MIN_GAIN_SHARE * (before.value - 1)
        found = zip(("this", "other"), self.gains, strict=True)
        return tuple(name for name, gain in found if before.value > 1 and gain.high < before.low and gain.value < least)

    @property
    def holds(self) -> bool:
        """Return whether the second environment is not slower, outputs agree, and the gain over float is not lost."""
        agrees = self.sqnr_db is None or self.sqnr_db >= MIN_SQNR_DB
        return self.verdict != "slower" and not self.lost_gain and agrees

    def lines(self) -> Iterator[str]:
        """Yield a line with the versions, a line for latency and a line for outputs, with verdicts."""
        versions = (*self.versions, self.recorded_version)
        this, other, recorded = (short_version(version) or "unknown" for version in versions)
        remarks = [f"the file was measured with {recorded}"] * (this != recorded)
        remarks += ["the versions are equal"] * (this == other)
        yield "; ".join((f"versions: {this} in this environment, {other} in the other one", *remarks))
        speed, ratio = self.speedup, _format_ratio(self.speedup, 3)
        yield (
            f"latency: {self.verdict}: the other environment is {ratio} as fast by turns, noise floor "
            f"{100 * self.noise_floor:.1f} % (medians {self.latencies_ms[0]:.3f} and {self.latencies_ms[1]:.3f} ms)"
        )
        if self.gains is None:
            yield "gain: not measured: the file has no Q/DQ pairs, so there is no float model to compare with"
        else:
            places = " and ".join("this environment" if name == "this" else "the other one" for name in self.lost_gain)
            verdict = f"the gain is gone in {places}" if places else "ok"
            here, there = (_format_ratio(gain, 2) for gain in self.gains)
            yield (
                f"gain over the float model: {verdict}: {here} in this environment, {there} in the other one, "
                f"{self.recorded_gain.value:.2f}x recorded"
            )
        if self.lost_gain:
            yield "remedy: run the experiment again with that version; it may have a faster placement, or none"
        if self.verdict == "tie" and speed.low < NARROW:
            lost = 100 * (1 - speed.low)
            yield f"remark: a loss of {lost:.0f} % is not excluded; narrower on an idle machine, by more --builds"
        if self.sqnr_db is None:
            yield "outputs: not compared: every output depends on random operators"
            return
        word = "ok" if self.sqnr_db >= MIN_SQNR_DB else "MISMATCH"
        yield f"outputs: {word}: they agree to {self.sqnr_db:.1f} dB (at least {MIN_SQNR_DB:g})"


def compare_runtimes(folder: Path, python: str, observer: Observer, *, builds: int = BUILDS) -> RuntimeComparison:
    """Run the script of a folder in this environment and in another one in turns, on the same random inputs.

    Args:
        folder: Folder to deploy; see `harness.ship.bundle`.
        python: Python program of the other environment, or the folder of the environment.
        builds: Number of fresh processes of each environment.
    """
    facts = read_bundle(folder)
    other = next(
        (path for path in (python, f"{python}/bin/python", f"{python}/Scripts/python") if shutil.which(path)), ""
    )
    if not other:
        raise UserError(f"--runtime-python {python}: no such program; that of an environment is ENVIRONMENT/bin/python")
    model = folder / str(facts["file"])
    places = {"this": sys.executable, "twin": sys.executable, "other": other}
    with (
        tempfile.TemporaryDirectory(prefix="qdq-runtimes-") as scratch,
        generated_script(folder, facts) as script,
    ):
        outputs = {name: Path(scratch) / f"{name}.npz" for name in places}
        repeat = ("--repeat", str(RUNS), "--model")
        runs = {
            name: partial(run_script_in, place, script, facts, *repeat, str(model), "--output", str(outputs[name]))
            for name, place in places.items()
        }
        without_pairs = Path(scratch) / "float.onnx"
        what = f"{model}: write it without Q/DQ pairs"
        if has_pairs := call_in_helper_process(what, write_without_pairs, model, without_pairs, factor=RUNTIME_FACTOR):
            for name in ("this", "other"):
                run = partial(run_script_in, places[name], script, facts, *repeat, str(without_pairs))
                runs[f"{name} float"] = run
        results = run_in_turns(runs, builds, f"compare environments on {folder.name}", observer)
        random = frozenset(find_random_outputs(read_qdq_graph(Path(model)).proto))
        sqnr_db = _least_agreement(_read_outputs(outputs["this"]), _read_outputs(outputs["other"]), random)
    latency_ms, floor = _read_latencies(results, "this")
    medians_ms = {name: float(np.median(each)) for name, each in latency_ms.items()}
    speedup = paired_ratio_ci(latency_ms["this"], latency_ms["other"])
    here, there = (
        paired_ratio_ci(latency_ms[f"{name} float"], latency_ms[name]) if has_pairs else None
        for name in ("this", "other")
    )
    return RuntimeComparison(
        speedup=speedup,
        noise_floor=floor,
        verdict=speedup_verdict(speedup, floor),
        latencies_ms=(medians_ms["this"], medians_ms["other"]),
        sqnr_db=sqnr_db,
        versions=(results["this"][-1]["version"], results["other"][-1]["version"]),
        recorded_version=str(facts["runtime"].get("version", "")),
        recorded_gain=Interval(**dict(zip(("value", "low", "high"), facts["speedup"], strict=True))),
        gains=None if here is None or there is None else (here, there),
    )


def _read_latencies(
    results: Mapping[str, Sequence[Mapping[str, Any]]], base: str
) -> tuple[dict[str, list[list[float]]], float]:
    """Return the latency in ms of each process by name, and the noise floor: `base` over its repetition "twin"."""
    latency_ms = {name: [[float(run["latency_ms"])] for run in each] for name, each in results.items()}
    ratios = [ours[0] / twin[0] for ours, twin in zip(latency_ms[base], latency_ms["twin"], strict=True)]
    return latency_ms, noise_floor_from_ratios(ratios)


def run_in_turns(
    runs: Mapping[str, Callable[[], dict[str, Any]]], builds: int, title: str, observer: Observer
) -> dict[str, list[dict[str, Any]]]:
    """Call functions in turns, in alternating order, and return the results of each by name.

    Each call holds the timing lock, so other measurements on these cores wait.

    Args:
        runs: Functions by name; each starts a fresh process.
        builds: Number of calls of each function.
        title: Description of the work in the progress bar.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    with observer.work(title, builds * len(runs)) as step:
        for turn in range(builds):
            for name in list(runs)[:: 1 if turn % 2 else -1]:
                with timing_lock():
                    found[name].append(runs[name]())
                step.advance()
    return found


def run_script_in(python: str, script: Path, facts: Mapping[str, Any], *arguments: str) -> dict[str, Any]:
    """Run the script of a folder to deploy in an environment, and return the values that it prints, see `run_script`.

    Args:
        python: Python program of the environment.
        facts: Content of `ship.json` of the folder.
    """
    target = find_target(facts["runtime"])
    try:
        return run_script(python, script, *arguments)
    except UserError as error:
        if target is None or "ModuleNotFoundError" not in str(error):
            raise
        missing = str(error).rpartition(": ")[2]
        raise UserError(f"{python}: {missing}: {python} -m pip install numpy {target.package}") from error


def _format_ratio(ratio: Interval, digits: int) -> str:
    value, low, high = (f"{each:.{digits}f}" for each in (ratio.value, ratio.low, ratio.high))
    return f"{value}x [{low}, {high}]"


def _read_outputs(path: Path) -> dict[str, Array]:
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def _least_agreement(one: Mapping[str, Array], two: Mapping[str, Array], random: frozenset[str]) -> float | None:
    """Return the smallest SQNR in dB of an output of one environment relative to the other; None if all are random.

    Raises:
        DoesNotHold: The outputs differ in names or shapes.
    """
    shapes = [{name: array.shape for name, array in each.items()} for each in (one, two)]
    if shapes[0] != shapes[1]:
        raise DoesNotHold(f"the environments give different outputs: {shapes[0]} and {shapes[1]}")
    compared = [name for name in one if name not in random]
    if one and not compared:
        return None
    floats = [name for name in compared if one[name].dtype.kind == "f"]
    same = all(np.array_equal(one[name], two[name]) for name in compared if name not in floats)
    return min([0.0] * (not same) + [output_sqnr(one[name], two[name]).sqnr_db for name in floats], default=MAX_SQNR_DB)


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
        folder: Folder to deploy.
        facts: Content of its `ship.json`, see `harness.results.deploy_folder.read_bundle`.
        edges: Inputs to quantize, see `harness.ship.recipes.PlacementSummary.inexpressible`.
        builds: Number of fresh processes of each model.
    """
    with tempfile.TemporaryDirectory(prefix="qdq-costs-") as scratch, generated_script(folder, facts) as script:
        run = partial(run_script_in, sys.executable, script, facts, "--repeat", str(RUNS), "--model")
        shipped = copy_model(folder / str(facts["file"]), Path(scratch))
        runs = {name: partial(run, str(shipped)) for name in ("shipped", "twin")}
        runs["shipped"]()  # raises if the runtime is not installed
        tensors = dict.fromkeys(edge.tensor for edge in edges)
        groups = [tuple(edge for edge in edges if edge.tensor == tensor) for tensor in tensors]
        timed = {}
        for number, group in enumerate([*groups, tuple(edges)] if len(groups) > 1 else groups):
            path = shipped.with_name(f"{number}.onnx")
            if write_with_edges(shipped, group, path):
                with suppress(UserError):
                    run(str(path))
                    timed[str(number)], runs[str(number)] = group, partial(run, str(path))
        results = run_in_turns(runs, builds, f"time {folder.name} with more inputs quantized", observer)
    latency_ms, floor = _read_latencies(results, "shipped")
    shipped_ms, costs = latency_ms["shipped"], list[EdgeCost]()
    for name, group in timed.items():
        ratio = paired_ratio_ci(latency_ms[name], shipped_ms)
        verdict = speedup_verdict(paired_ratio_ci(shipped_ms, latency_ms[name]), floor)
        costs.append(EdgeCost(edges=group, ratio=ratio, verdict=verdict, noise_floor=floor))
    return tuple(costs)
