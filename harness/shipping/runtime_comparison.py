"""Check of a folder to deploy on this machine, and comparison of two Python environments on it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.accuracy.metrics.sqnr import output_sqnr
from harness.api import Array
from harness.errors import UserError
from harness.progress import Observer
from harness.shipping.bundle import generated_script, read_bundle, run_script
from harness.statistics import Interval, noise_floor_from_ratios, paired_ratio_ci, speedup_verdict
from harness.timing.workers.locks import timing_lock

__all__ = ["MIN_SQNR_DB", "RuntimeComparison", "compare_runtimes"]

ROUNDS, RUNS = 5, 30
MIN_SQNR_DB = 20.0  # between the outputs of two versions of a runtime, of which one may choose other INT8 kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeComparison:
    """Comparison of two environments that run the same file in turns, each time in a fresh process.

    Attributes:
        speedup: Latency in the first environment over that in the second.
        noise_floor: Gain of the first environment over its own repetition.
        verdict: "faster", "tie" or "slower": the second environment.
        latencies_ms: Median latency in each environment.
        sqnr_db: Agreement of the outputs, of the output that agrees least; None with one environment.
    """

    speedup: Interval
    noise_floor: float
    verdict: str
    latencies_ms: tuple[float, float]
    sqnr_db: float

    @property
    def holds(self) -> bool:
        """Return whether the second environment is not slower, and computes the same."""
        return self.verdict != "slower" and self.sqnr_db >= MIN_SQNR_DB

    def lines(self) -> Iterator[str]:
        """Yield a line for latency and one for outputs, with verdicts."""
        speed = self.speedup
        ratio = f"{speed.value:.3f}x [{speed.low:.3f}, {speed.high:.3f}]"
        yield (
            f"latency: {self.verdict}: the other environment is {ratio} as fast by turns, noise floor "
            f"{100 * self.noise_floor:.1f} % (medians {self.latencies_ms[0]:.3f} and {self.latencies_ms[1]:.3f} ms)"
        )
        word = "ok" if self.sqnr_db >= MIN_SQNR_DB else "MISMATCH"
        yield f"outputs: {word}: they agree to {self.sqnr_db:.1f} dB (at least {MIN_SQNR_DB:g})"


def compare_runtimes(folder: Path, python: str, observer: Observer, *, rounds: int = ROUNDS) -> RuntimeComparison:
    """Run the script of a folder in this environment and in another one in turns, on the same random inputs.

    Args:
        folder: Folder to deploy; see `harness.shipping.bundle`.
        python: Python program of the other environment.
        rounds: Number of fresh processes of each environment.

    Raises:
        UserError: It is no such folder, a file is damaged, or the script fails in an environment.
    """
    facts = read_bundle(folder)
    if shutil.which(python) is None:
        raise UserError(f"--runtime-python {python}: no such program")
    model = str(folder / facts["file"])
    places = {"this": sys.executable, "twin": sys.executable, "other": python}
    medians_ms: dict[str, list[float]] = {name: [] for name in places}
    with (
        tempfile.TemporaryDirectory(prefix="qdq-runtimes-") as scratch,
        generated_script(folder, facts) as script,
        observer.work(f"compare environments on {folder.name}", rounds * len(places)) as step,
    ):
        for turn in range(rounds):
            for name in list(places)[:: 1 if turn % 2 else -1]:
                output = Path(scratch) / f"{name}.npz"
                with timing_lock():
                    arguments = ("--model", model, "--repeat", str(RUNS), "--output", str(output))
                    found = run_script(places[name], script, *arguments)
                medians_ms[name].append(float(found["latency_ms"]))
                step.advance()
        sqnr_db = _least_agreement(*(_read_outputs(Path(scratch) / f"{name}.npz") for name in ("this", "other")))
    ratios = np.divide(medians_ms["this"], medians_ms["twin"])
    before, after = ([[value] for value in medians_ms[name]] for name in ("this", "other"))
    speedup = paired_ratio_ci(before, after)
    floor = noise_floor_from_ratios(list(ratios))
    latency_ms, other_ms = (float(np.median(medians_ms[name])) for name in ("this", "other"))
    return RuntimeComparison(
        speedup=speedup,
        noise_floor=floor,
        verdict=speedup_verdict(speedup, floor),
        latencies_ms=(latency_ms, other_ms),
        sqnr_db=sqnr_db,
    )


def _read_outputs(path: Path) -> dict[str, Array]:
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def _least_agreement(one: Mapping[str, Array], two: Mapping[str, Array]) -> float:
    """Return the SQNR in dB of the output that agrees least.

    Raises:
        UserError: The outputs have other names or shapes.
    """
    shapes = [{name: array.shape for name, array in each.items()} for each in (one, two)]
    if shapes[0] != shapes[1]:
        raise UserError(f"the environments give different outputs: {shapes[0]} and {shapes[1]}")
    floats = [name for name, array in one.items() if array.dtype.kind == "f"]
    same = all(np.array_equal(one[name], two[name]) for name in one if name not in floats)
    return min([0.0] * (not same) + [output_sqnr(one[name], two[name]).sqnr_db for name in floats], default=0.0)
