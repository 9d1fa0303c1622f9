"""Notes below each table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pandas as pd

from harness.accuracy.metrics.intervals import Estimate, decode_accuracy, metric_estimate
from harness.report.frames.budget_frames import metric_usage_note
from harness.report.frames.decision import BEST_FOUND_LABEL
from harness.report.frames.main_frame import UNUSABLE_VERDICTS
from harness.report.load.display_names import BEYOND_BOUND_VERDICT, METRIC_CAPS, UNSCORED_VERDICT, metric_name
from harness.report.load.results import NOISY_FLOOR, CellResults, Results
from harness.report.report_table import format_interval
from harness.report.tables.captions import DECISION_NOTE
from harness.report.tables.check_notes import check_notes
from harness.results_dir.artifacts import ACCURACY_ONLY_VERDICT, FLOAT_ROW
from harness.timing.provenance import lacks_vnni, processor_label
from harness.timing.turn_log import disturbance_note

__all__ = [
    "backend_notes", "data_notes", "decision_note", "floor_note", "main_note", "noise_note", "partial_note",
    "progress_note",
    "without_vnni",
]  # fmt: skip

UNSCORED_DECISION = "not shipped: not scored"
MAX_DISTURBED_EVALUATION_SHARE = 0.10
"""Share of disturbed evaluations above which a search is called misled."""
WIDE_BASELINE_INTERVAL_SHARE = 0.25
"""Half-width of the interval of the float model's latency over builds from which on milliseconds say little."""


def noise_note(cell: CellResults) -> str:
    """What the machine did to the figures of a cell; "" where it was quiet."""
    told = [
        what
        for what in (
            _rough_noise_note(cell),
            disturbance_note(cell.disturbed),
            _disturbed_share_note(cell),
            _baseline_uncertainty_note(cell),
        )
        if what
    ]
    return f"Noisy machine, {cell.name}: {'; '.join(told)}. Close other work and repeat." if told else ""


def floor_note(cells: Iterable[CellResults]) -> str:
    """Up to which gain the float model differs from itself, by cell."""
    floors = [f"{cell.name} {cell.floor:.1%}" for cell in cells if cell.floor is not None]
    if not floors:
        return "A/A floor: not measured yet."
    return (
        "A/A floor, by which the float model and its twin differ at most in single builds (in 95 % of them, up to 20 "
        f"builds in all of them): {', '.join(floors)}."
    )


def _rough_noise_note(cell: CellResults) -> str:
    """That gains drown in the noise."""
    return f"the A/A floor is {cell.floor:.1%}" if cell.floor is not None and cell.floor > NOISY_FLOOR else ""


def _disturbed_share_note(cell: CellResults) -> str:
    """That many readings of its searches were disturbed: what is confirmed then holds, but may be a poor choice."""
    readings = sum(search.evaluations for search in cell.searches)
    unsteady = sum(int(search.cost.get("unsteady", 0)) for search in cell.searches)
    if unsteady <= MAX_DISTURBED_EVALUATION_SHARE * readings:
        return ""
    return f"{unsteady} of {readings} evaluations of its searches stayed disturbed, so they may have chosen badly"


def _baseline_uncertainty_note(cell: CellResults) -> str:
    """That the float model's own latency is hardly known: speedups are paired, milliseconds are not."""
    if FLOAT_ROW not in cell.summaries:
        return ""
    own = cell.summaries[FLOAT_ROW].latency_ms
    if own.high <= own.value * (1 + WIDE_BASELINE_INTERVAL_SHARE):
        return ""
    shown = format_interval(own.value, own.low, own.high, 3)
    return f"the float model took {shown} ms, so go by speedups, which are paired, and not by milliseconds"


def progress_note(results: Results) -> str:
    """How far a run is in which no search has ended; "" where one has."""
    if any(cell.picks for cell in results.cells):
        return ""
    if results.cells:
        return "No search has ended yet."
    if not results.starting:
        return "No cell has begun yet."
    return f"{', '.join(results.starting)} began, and has come to no search yet."


def partial_note(results: Results) -> str:
    """What a run that has not ended still lacks; "" where nothing."""
    names = [cell.name for cell in results.cells if not cell.complete] + list(results.waiting)
    if not names:
        return ""
    head = f"UNFINISHED, so this is partial: {', '.join(names)}; repeat qdq run to go on."
    return " ".join([head, *_stopped_tasks(results)])


def _stopped_tasks(results: Results) -> list[str]:
    """What the runs of cells said when they ended before their time; once where it was the same."""
    found: dict[str, list[str]] = {}
    for name, reason in results.stops.items():
        found.setdefault(reason, []).append(name)
    return [f"{', '.join(names)} stopped: {reason}" for reason, names in found.items()]


def backend_notes(cells: Iterable[CellResults]) -> tuple[str, ...]:
    """What backends have to say below every table with their figures; a line each."""
    told = {cell.note: str(cell.facts["backend"].get("name")) for cell in cells if cell.note}
    return tuple(f"{name}: {note}." for note, name in told.items())


def data_notes(cells: Sequence[CellResults]) -> tuple[str, ...]:
    """What the data of some cells do not carry, below every table with their figures; a line each."""
    random = sorted({cell.facts["model"] for cell in cells if cell.facts["calibrated_on"] == "random data"})
    told = [f"Calibrated on random data (no accuracy): {', '.join(random)}."] if random else []
    told += [f"Accuracy of {c.name}: {said}." for c in cells if (said := c.scores.get(FLOAT_ROW, {}).get("note"))]
    told += [
        f"Accuracy of {cell.name}: the float model itself scores {cell.score(FLOAT_ROW):.4f}, so drops say nothing; "
        "look at preprocessing, decoder, labels and the order of their classes."
        for cell in cells
        if cell.blind
    ]
    scored = [cell for cell in cells if FLOAT_ROW in cell.scores and without_vnni(cell)]
    if rough := [cell.name for cell in scored if not _uses_reduced_data(cell)]:
        told.append(
            f"Accuracy of {', '.join(rough)}: of a processor without VNNI, where INT8 products saturate; one that has "
            "it gives other drops."
        )
    if reduced := [cell.name for cell in scored if _uses_reduced_data(cell)]:
        told.append(
            f"Accuracy of {', '.join(reduced)}: of a processor without VNNI, where products with weights of 8 bits "
            "saturate: those of placements and of quantize_static have 7, those of ModelOpt's models and of imported "
            "ones what they came with."
        )
    few: dict[str, list[str]] = {}
    for cell in cells:
        if note := _few_images_note(cell):
            few.setdefault(note, []).append(cell.name)
    return (*told, *(f"Accuracy of {', '.join(names)}: {note}." for note, names in few.items()))


def without_vnni(cell: CellResults) -> bool:
    """Whether the device is a processor that adds products of integers in 16 bits."""
    own = str(cell.environment.get("cpu", {}).get("model"))
    device = cell.facts["backend"].get("device")
    return lacks_vnni(cell.environment) and device in {own, processor_label(own, cell.environment)}


def _uses_reduced_data(cell: CellResults) -> bool:
    """Whether weights were stored in 7 bits; backends say so where they are."""
    return str(cell.facts["backend"].get("dialect", "")).endswith("_7bit")


def _few_images_note(cell: CellResults) -> str:
    """That a cell was scored on too few images to say much; "" where it was not."""
    estimate = _float_estimate(cell)
    return "" if estimate is None else estimate.caveat


def _float_estimate(cell: CellResults) -> Estimate | None:
    """The float model's own figure with its interval over images; None where the record allows none."""
    score = cell.scores.get(FLOAT_ROW, {})
    if cell.metric is None or cell.metric in METRIC_CAPS or "metrics" not in score:
        return None
    return metric_estimate(decode_accuracy(score), cell.metric)


def _float_score_intervals(cells: Iterable[CellResults]) -> Iterator[str]:
    """Figures of the float models with the interval that other images would move them in; a drop's is its own."""
    for cell in cells:
        if (estimate := _float_estimate(cell)) is not None:
            shown = format_interval(estimate.interval.value, estimate.interval.low, estimate.interval.high, 4)
            yield f"{cell.name} {metric_name(cell.metric)} {shown} ({estimate.images} images)"


def decision_note(decisions: pd.DataFrame) -> str:
    """What shipping and "best found" mean, also where no searcher's choice may be shipped.

    Args:
        decisions: See `harness.report.frames.decision.decision_frame`.
    """
    lines = decisions.to_dict("records")
    best = [line for line in lines if line["role"] == BEST_FOUND_LABEL]
    broken = [
        str(line["cell"])
        for line in best
        if pd.notna(line["speedup"]) and line["decision"].startswith(UNUSABLE_VERDICTS)
    ]
    told = [
        DECISION_NOTE,
        "Figures, brackets, bold and underlined as in the main table. File MB: of the ONNX file, 10^6 bytes.",
    ]
    if best:
        told.append(
            "Best found: of the searchers whose choice keeps the bound on accuracy, where there is one, the one that "
            "was fastest in the runoff, or where not all of them were in one by the searches' own samples; the figures "
            "are fresh ones."
        )
    if broken:
        told.append(
            f"Where no searcher's choice keeps it ({', '.join(broken)}), the fastest of all stands there; it is not to "
            "be shipped."
        )
    if any(UNSCORED_DECISION in line["decision"] for line in lines):
        told.append("Outputs that are not finite are a reason not to ship, and are named as one.")
    return " ".join(told)


def main_note(results: Results) -> str:
    """How the figures of the main table came about, the floors, and what is odd about the calibration."""
    bounds = sorted({cell.allowed for cell in results.cells if cell.allowed is not None})
    builds = sorted({cell.builds for cell in results.cells if cell.builds is not None})
    within = f" among those whose drop is at most {' or '.join(f'{b:g}' for b in bounds)}" if bounds else ""
    lines = [
        f"Latency: geometric mean over {' or '.join(str(n) for n in builds) or 'some'} fresh builds (the baseline: "
        f"as many or more) of their median turns. Speedup: {_speedup_denominator(results.cells)}, paired by turns, so "
        "not quite the ratio of two latencies of the table. Intervals: 95 %, Student's over builds.",
        "Tie: the interval contains 1, or the gain is below 1 % or below the A/A floor: use float. "
        f"Bold: the fastest of a finished cell{within}. Underlined: not "
        "distinguishable from it by the same rule, paired. A searcher stands with the best of its seeds, by the runoff "
        "or without one by its own samples. Builds ok: in that search, for the others in the confirmation. Minutes: "
        "wall-clock of that search.",
        *_drop_definition(results.cells),
        *_verdict_caveats(results.cells, bounds),
        floor_note(results.cells),
    ]
    if versions := _version_note(results.cells):
        lines.append(versions)
    if halves := [cell.name for cell in results.cells if cell.facts.get("halves")]:
        lines.append(
            f"Searches saw one half of the evaluator's data, scores and drops are of the other: {', '.join(halves)}."
        )
    if own := ", ".join(_float_score_intervals(results.cells)):
        lines.append(f"Scores of the float models, with 95 % over images: {own}.")
    if full := [
        f"Full evaluations of {cell.name}: {text}." for cell in results.cells if (text := metric_usage_note(cell))
    ]:
        lines += ["Full evaluations: those whose metric was measured, seeds added up.", *full]
    lines += [text for cell in results.cells for text in check_notes(cell)]
    lines += [f"Calibration of {c.name}: {text}." for c in results.cells for text in c.remarks]
    lines += [f"Starts of {c.name}: {text}." for c in results.cells for text in c.cache_remarks]
    lines += [f"Baselines of {c.name}: {text}." for c in results.cells if (text := _tool_note(c))]
    return "\n".join([*lines, *filter(None, [partial_note(results)])])


def _tool_note(cell: CellResults) -> str:
    """Return which PTQ tools calibrated by another method than the experiment names; "" where none did."""
    told = ", ".join(f"{name} by {method}" for name, method in cell.tool_methods.items())
    asked = cell.facts.get("calibration", {}).get("method")
    return f"calibrated {told}, the nearest that the tool has to {asked}" if told else ""


def _version_note(cells: Sequence[CellResults]) -> str:
    """That cells were measured with different versions of this code; "" where they were not."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        if commit := str(cell.environment.get("git_commit", "")):
            found.setdefault(commit[:12] + commit[40:], []).append(cell.name)
    told = "; ".join(f"{commit} {', '.join(names)}" for commit, names in found.items())
    return f"Begun with different versions of this code: {told}." if len(found) > 1 else ""


def _drop_definition(cells: Sequence[CellResults]) -> Iterator[str]:
    """What a drop and its interval are; nothing where nothing was scored."""
    if any(cell.score(FLOAT_ROW) is not None and cell.metric not in METRIC_CAPS for cell in cells):
        yield (
            "Drop: loss against the float baseline, positive is worse; its interval: 95 % of the bootstrap over "
            "images, the same draws for both, where the records of single images allow one."
        )


def _verdict_caveats(cells: Sequence[CellResults], bounds: Sequence[float]) -> Iterator[str]:
    """What some verdicts and scores do not say."""
    if bounds:
        yield (
            f'"{BEYOND_BOUND_VERDICT}": the drop breaks the bound of the experiment; however fast it is, it '
            "is not to be shipped."
        )
    if any("failed" in score for cell in cells for score in cell.scores.values()):
        yield f'"{UNSCORED_VERDICT}": its outputs could not be scored (not finite, as a rule); it is not to be shipped.'
    if any(pick.reason.startswith(ACCURACY_ONLY_VERDICT) for cell in cells for pick in cell.picks):
        reason = "the device has no speed at that precision, so such a row is scored and never timed."
        yield f'"{ACCURACY_ONLY_VERDICT}": {reason}'
    if names := {metric_name(cell.metric) for cell in cells if cell.metric in METRIC_CAPS}:
        yield f"No drop of {', '.join(sorted(names))}: it compares with the float model, whose own value is a cap."


def _speedup_denominator(cells: Iterable[CellResults]) -> str:
    """What the speedups are over, by cell where cells differ."""
    groups: dict[str, list[str]] = {}
    for cell in cells:
        groups.setdefault(_float_baseline_label(cell), []).append(cell.name)
    if len(groups) <= 1:
        return " ".join(["over the float model", *groups])
    parts = [f"{how} ({', '.join(names)})" for how, names in groups.items()]
    return f"over the float model {', '.join(parts)}"


def _float_baseline_label(cell: CellResults) -> str:
    backend = cell.facts["backend"]
    precision = backend.get("float_precision")
    if cell.float_measured:
        return f"at {precision}, the fastest float precision by measurement"
    if precision is None:
        return "as it is"
    return f"at {precision} (pinned)" if len(backend.get("float_params", {})) > 1 else f"at {precision}"
