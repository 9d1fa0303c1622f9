"""An explanation as lines for people, and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from harness.explain.fusion import FusionReport
from harness.explain.layer_kinds import is_low_precision
from harness.explain.model_report import PrecisionChange

__all__ = ["change_lines", "report_data", "report_lines"]

FINDING_TITLES = {
    "float": "Linear operators that were to run quantized and do not",
    "pair": "Q or DQ that run by themselves",
    "reformat": "Layers that only change layout or type",
}


def report_lines(found: FusionReport, top: int) -> Iterator[str]:
    """The answers: what runs in which precision, what is left over and why, where the time goes.

    Args:
        found: What is told.
        top: Longest list.
    """
    counts = Counter(found.precision.values())
    shown = ", ".join(f"{count} {kind or 'that the runtime does not name'}" for kind, count in counts.most_common())
    yield f"{found.runtime}: {len(found.layers)} layers, {found.whole_ms:.3f} ms an inference while profiled"
    yield f"Linear operators: {len(found.precision)}; quantized in the file {found.asked}, in the engine {found.low}"
    yield f"  they run in: {shown}"
    for what, title in FINDING_TITLES.items():
        entries = [finding for finding in found.findings if finding.what == what]
        total = sum(finding.time_ms or 0.0 for finding in entries)
        yield f"{title}: {len(entries)}" + (f", {total:.3f} ms together" if entries else "")
        for finding in entries[:top]:
            yield f"  {_format_ms(finding.time_ms)}  {finding.name}: {finding.reason}"
        if len(entries) > top:
            yield f"  and {len(entries) - top} more"
    timed = sorted((layer for layer in found.layers if layer.time_ms), key=lambda layer: -(layer.time_ms or 0.0))
    yield f"Where the time goes ({sum(layer.time_ms or 0.0 for layer in timed):.3f} ms in all layers):"
    for layer in timed[:top]:
        mark = "*" if is_low_precision(layer.precision) else " "
        taken = f" (+{found.fused[layer.name]} Q/DQ)" if layer.name in found.fused else ""
        yield f"  {_format_ms(layer.time_ms)} {mark} {layer.kind} {layer.precision} {layer.name}{taken}"


def change_lines(
    before: FusionReport, after: FusionReport, changes: Sequence[PrecisionChange], top: int
) -> Iterator[str]:
    """How a second model differs from a first one."""
    yield f"Difference: {before.low} -> {after.low} linear operators quantized, " + (
        f"{len(before.layers)} -> {len(after.layers)} layers, {before.whole_ms:.3f} -> {after.whole_ms:.3f} ms"
    )
    for what, title in FINDING_TITLES.items():
        counts = [sum(finding.what == what for finding in found.findings) for found in (before, after)]
        yield f"  {title}: {counts[0]} -> {counts[1]}"
    for change in changes[:top]:
        yield f"  {change.name}: {change.before or 'absent'} -> {change.after or 'absent'}"
    if len(changes) > top:
        yield f"  and {len(changes) - top} more"


def report_data(found: FusionReport) -> dict[str, Any]:
    """As JSON holds it."""
    return asdict(found)


def _format_ms(time_ms: float | None) -> str:
    return "        -" if time_ms is None else f"{time_ms:6.3f} ms"
