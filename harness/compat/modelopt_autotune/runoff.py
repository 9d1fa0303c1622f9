"""Final comparison of the fastest candidates, because the lowest of many readings is often a lucky one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.api import Array, Candidate
from harness.compat.modelopt_autotune.benchmark import Benchmark
from harness.config.sections import Limits
from harness.pipeline.runtime_checker import CheckPlan, RuntimeChecker, runs_no_model
from harness.progress import Observer
from harness.records import MAIN_BENCHMARKER
from harness.selection.paired_timing import PairedComparison, read_speedups
from harness.selection.racing import FIRST_SCHEDULE, run_race
from harness.timing.confirmation import Contender, EngineFactory
from harness.timing.provenance import machine_lacks_vnni
from harness.timing.racing_test import TURNS_PER_RACING_ROUND
from search.space import edges_digest

__all__ = ["FinalSelection", "open_checker", "select_fastest"]

BASELINE_ROW = "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalSelection:
    """Where rivals meet.

    Attributes:
        path: Takes every turn; what is there of the same rivals and facts is not timed again.
        facts: What a record depends on beside the rivals, as JSON has it.
    """

    path: Path
    facts: Mapping[str, Any]
    open_engines: EngineFactory
    observer: Observer


@contextmanager
def open_checker(
    benchmark: Benchmark, feeds: Iterable[Mapping[str, Array]], folder: Path, observer: Observer
) -> Iterator[Callable[[Candidate], bool]]:
    """Give a function that says whether the runtime computes something else than the file of a candidate says.

    Args:
        feeds: Calibration samples.
        folder: Holds `baseline.onnx`, the float model, and gets the record and small models that show a fault.
        observer: Hears of wrong results, and of candidates that could not be compared.
    """
    if runs_no_model(benchmark.backend):
        yield lambda candidate: False
        return
    floating = folder / "baseline.onnx"
    with tempfile.TemporaryDirectory(prefix="qdq-check-") as scratch, benchmark.open_fresh_engines() as engines:
        plan = CheckPlan(
            float_file=floating,
            floats={MAIN_BENCHMARKER: floating},
            feeds=feeds,
            folder=folder,
            work=Path(scratch),
            limits=Limits(),
            saturates=machine_lacks_vnni(),
        )
        with RuntimeChecker(plan, engines, observer) as checker:
            checker.check(Candidate(digest=edges_digest(()), edges=(), source=lambda: floating), name="the float model")

            def is_wrong(candidate: Candidate) -> bool:
                found = checker.check(candidate)
                if found.verdict == "not checked":
                    observer.say(f"{candidate.digest}: {found}")
                return found.is_wrong

            yield is_wrong


def select_fastest(rivals: Sequence[Candidate], baseline: Candidate, runoff: FinalSelection) -> tuple[str, float]:
    """Digest of the one that wins the race (`harness.selection.racing`), and its speedup there; "" where none came
    through.

    Args:
        baseline: The float model, which takes its turn beside them.

    Raises:
        UserError: The baseline fails, or the record cannot be written.
    """
    rows = tuple(Contender(name=rival.digest, candidate=rival) for rival in rivals)
    names = [row.name for row in rows]
    contest = PairedComparison(
        name="runoff",
        path=runoff.path,
        header={"rows": sorted(names), "heats": list(TURNS_PER_RACING_ROUND), **runoff.facts},
        baseline=Contender(name=BASELINE_ROW, candidate=baseline),
        rows=rows,
        schedule=FIRST_SCHEDULE,
    )
    (left,) = run_race(contest, {"all": names}, 1, runoff.open_engines, runoff.observer).values()
    speedups = read_speedups(runoff.path, BASELINE_ROW)
    won = max(left or speedups, key=speedups.__getitem__, default="")  # who was beaten, where all others failed
    return won, speedups.get(won, 0.0)
