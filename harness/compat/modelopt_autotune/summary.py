"""Final summary: comparison of the written model with the float model, and advice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.timing.confirmation import ConfirmationSummary

__all__ = ["AutotuneResult", "summary_lines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneResult:
    """What was delivered, and the model that was timed for it.

    Attributes:
        file: It.
        kept: Where the timed model lies, as the float model was delivered in its place; None: it was delivered itself.
        pairs: Q/DQ pairs of the timed model; 0: it is the float model.
        read: Speedup by the reading that made the timed model the choice; None where nobody knows it.
        options: Of the runtime, in words; "" without any.
        calibrated: Scales are of data of the model's own.
    """

    file: Path
    kept: Path | None
    pairs: int
    read: float | None
    options: str
    calibrated: bool


def is_proven_faster(summary: ConfirmationSummary) -> bool:
    """Whether the model that was built afresh is faster than the float model, beyond what noise would do."""
    return "final" in summary.rows and summary.rows["final"].verdict == "faster"


def summary_lines(summary: ConfirmationSummary, delivered: AutotuneResult) -> Iterator[str]:
    """Sentences for people, the figures first.

    Args:
        summary: Of fresh builds of both, with the rows "baseline" and "final".
    """
    if "final" not in summary.rows:
        yield f"Final: could not be timed: {summary.failed['final'].reason}"
        if delivered.kept is not None:
            yield _describe_float_delivery("What cannot be timed beside the float model is not delivered", delivered)
        return
    float_row, row = summary.rows["baseline"], summary.rows["final"]
    low, high = row.speedup.low, row.speedup.high
    yield f"Baseline: {float_row.latency_ms.value:.3f} ms, built afresh as the final model is"
    if delivered.kept is None and not delivered.pairs:
        yield "Final: the float model, because no placement of Q/DQ pairs proved faster"
        yield f"Written: {delivered.file}, which is that model"
        return
    timed_model = "Final" if delivered.kept is None else delivered.kept.name
    yield (
        f"{timed_model}: {row.latency_ms.value:.3f} ms ({row.speedup.value:.3f}x speedup, 95 % interval {low:.3f} to "
        f"{high:.3f}, {row.verdict}; {row.builds} fresh builds in turns with the baseline, A/A "
        f"floor {100 * summary.floor:.1f} %), "
        f"{delivered.pairs} Q/DQ pairs"
    )
    timed = f" (timed with {delivered.options}: deploy it so)" if delivered.options else ""
    yield f"Written: {delivered.file}{timed}"
    if delivered.kept is not None:
        beaten = (
            "Slower than the float model" if row.verdict == "slower" else "Not faster than the float model beyond noise"
        )
        yield _describe_float_delivery(beaten, delivered)
    elif not delivered.calibrated:
        yield "Scales are of random data, so its accuracy is unknown: give --calibration_data before you use it"
    else:
        yield "Its accuracy was not looked at: qdq run does, with the evaluator fidelity where there are no labels"
    if delivered.read is not None and delivered.read > high:
        yield (
            f"While it was searched it read {delivered.read:.3f}x: the best of many readings is a lucky one, so only "
            "the fresh builds count"
        )


def _describe_float_delivery(why: str, delivered: AutotuneResult) -> str:
    kept = "" if delivered.kept is None else f"; the one with Q/DQ pairs is kept as {delivered.kept.name}"
    return f"{why}, so {delivered.file.name} is that model{kept}"
