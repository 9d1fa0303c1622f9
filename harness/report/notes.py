"""What a reader must know of each table; it stands below it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pandas as pd

from harness.evaluators.intervals import Estimate, accuracy_of, metric_estimate
from harness.measure.events import disturbance_note
from harness.report.decision import BEST
from harness.report.naming import BEYOND, CAPPED, UNSCORED, metric_name
from harness.report.results import CellResults, Results
from harness.report.tables import interval
from harness.run.rows import ACCURACY_ONLY, FLOAT_ROW, Pick

__all__ = [
    "BUDGET_NOTE", "COST_NOTE", "FINALIST_NOTE", "LEVEL_NOTE", "PRECISION_NOTE", "TARGET_NOTE", "VARIANCE_NOTE",
    "backend_notes", "data_notes", "decision_note", "floor_note", "main_note", "noise", "partial", "progress",
]  # fmt: skip

BUDGET_NOTE = (
    "Confirmed speedup over the float baseline of the incumbent after so many evaluations: median over seeds "
    "[95 % interval of the median; where there are fewer than six seeds, from the lowest to the highest limit of their "
    "own 95 % intervals]. Bold: the highest median of a cell at a budget; underlined: its interval meets that of the "
    "highest. An incumbent holds the bound on accuracy by what its search saw; what is left of that stands in the main "
    "table."
)
FINALIST_NOTE = (
    "Every placement that a search sent to the confirmation at its largest budget; METHOD #2 is the second best of a "
    "search, by its runoff where there was one, else by its own samples (of a front: by the area that it dominates). "
    "The main table shows the best seed of each searcher by the same rule, never by the confirmed ones. Shrinkage: "
    "speedup by the search's own samples less the confirmed one. Brackets as in the main table."
)
COST_NOTE = (
    "The seeds of a searcher together, wall-clock from the first proposal; composing, calibration, runoff and "
    "confirmation are not in it. Harness: the share outside build, sampling, evaluation and failed candidates; the "
    "searcher's own work is in it. Readings saved: by racing, an estimate, as a share of those that would have been "
    "taken. Built again: candidates that beat the incumbent by more than noise. Taken again: candidates whose first "
    "readings drifted or were disturbed; unsteady: their second ones too, or they never warmed up."
)
DECIDED = (
    "Decision: shipped is what is faster than the float baseline beyond the noise, and whose drop of accuracy is "
    "within the bound where there is one; the drop itself counts, not its interval."
)
PRECISION_NOTE = f"{DECIDED} Figures, brackets, bold and underlined as in the main table."
LEVEL_NOTE = (
    "A placement is as fast as the median of what the searches of the cell read of it, so that one that several of "
    "them came to, a start for instance, stands at one level."
)
TARGET_NOTE = (
    "Evaluations (minutes) until the incumbent had this share of the best gain that any search of the cell found: "
    "median over seeds, range of the evaluations in brackets, and how many of the seeds came so far. Initial "
    "placements count. Incumbents and gains are those of the searches' own readings: one whose choice only the runoff "
    'or the confirmation showed to be that fast stands as "never". ' + LEVEL_NOTE
)
VARIANCE_NOTE = (
    "Relative standard deviation of single inferences within a turn, of turns within a build, and of fresh builds: "
    "nested analysis of variance on logarithms, median over the rows of a cell."
)

UNFIT = "not shipped: not scored"
BROKEN = ("not shipped: accuracy", UNFIT)
NOISY = 0.10
"""A/A floor from which on a machine is called noisy: gains of the size that quantization has drown in it."""
UNSTEADY = 0.25
"""Half-width of the interval of the float model's latency over builds from which on milliseconds say little."""


def noise(cell: CellResults) -> str:
    """What the machine did to the figures of a cell; "" where it was quiet."""
    told = [what for what in (_rough(cell), disturbance_note(cell.disturbed), _unsteady(cell)) if what]
    return f"Noisy machine, {cell.name}: {'; '.join(told)}. Close other work and repeat." if told else ""


def floor_note(cells: Iterable[CellResults]) -> str:
    """Up to which gain the float model differs from itself, by cell."""
    floors = [f"{cell.name} {cell.floor:.1%}" for cell in cells if cell.floor is not None]
    return f"A/A floor: {', '.join(floors) if floors else 'not measured yet'}."


def _rough(cell: CellResults) -> str:
    """That gains drown in the noise."""
    return f"the A/A floor is {cell.floor:.1%}" if cell.floor is not None and cell.floor > NOISY else ""


def _unsteady(cell: CellResults) -> str:
    """That the float model's own latency is hardly known: speedups are paired, milliseconds are not."""
    if FLOAT_ROW not in cell.summaries:
        return ""
    own = cell.summaries[FLOAT_ROW].latency_ms
    if own.high <= own.value * (1 + UNSTEADY):
        return ""
    shown = interval(own.value, own.low, own.high, 3)
    return f"the float model took {shown} ms, so go by speedups, which are paired, and not by milliseconds"


def progress(results: Results) -> str:
    """How far a run is in which no search has ended; "" where one has."""
    if any(cell.picks for cell in results.cells):
        return ""
    if results.cells:
        return "No search has ended yet."
    if not results.starting:
        return "No cell has begun yet."
    return f"{', '.join(results.starting)} began, and has come to no search yet."


def partial(results: Results) -> str:
    """What a run that has not ended still lacks; "" where nothing."""
    names = [cell.name for cell in results.cells if not cell.complete] + list(results.waiting)
    if not names:
        return ""
    head = f"UNFINISHED, so this is partial: {', '.join(names)}; repeat qdq run to go on."
    return " ".join([head, *_stops(results)])


def _stops(results: Results) -> list[str]:
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
    few: dict[str, list[str]] = {}
    for cell in cells:
        if note := _few(cell):
            few.setdefault(note, []).append(cell.name)
    return (*told, *(f"Accuracy of {', '.join(names)}: {note}." for note, names in few.items()))


def _few(cell: CellResults) -> str:
    """That a cell was scored on too few images to say much; "" where it was not."""
    estimate = _float_figure(cell)
    return "" if estimate is None else estimate.note


def _float_figure(cell: CellResults) -> Estimate | None:
    """The float model's own figure with its interval over images; None where the record allows none."""
    score = cell.scores.get(FLOAT_ROW, {})
    if cell.metric is None or cell.metric in CAPPED or "metrics" not in score:
        return None
    return metric_estimate(accuracy_of(score), cell.metric)


def _own(cells: Iterable[CellResults]) -> Iterator[str]:
    """Figures of the float models with the interval that other images would move them in; a drop's is its own."""
    for cell in cells:
        if (estimate := _float_figure(cell)) is not None:
            shown = interval(estimate.interval.value, estimate.interval.low, estimate.interval.high, 4)
            yield f"{cell.name} {metric_name(cell.metric)} {shown} ({estimate.images} images)"


def decision_note(decisions: pd.DataFrame) -> str:
    """What shipping and "best found" mean, also where no searcher's choice may be shipped.

    Args:
        decisions: See `harness.report.decision.decision_frame`.
    """
    lines = decisions.to_dict("records")
    best = [line for line in lines if line["role"] == BEST]
    broken = [str(line["cell"]) for line in best if pd.notna(line["speedup"]) and line["decision"].startswith(BROKEN)]
    told = [
        DECIDED,
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
    if any(UNFIT in line["decision"] for line in lines):
        told.append("Outputs that are not finite are a reason not to ship, and are named as one.")
    return " ".join(told)


def main_note(results: Results) -> str:
    """How the figures of the main table came about, the floors, and what is odd about the calibration."""
    bounds = sorted({cell.allowed for cell in results.cells if cell.allowed is not None})
    builds = sorted({cell.builds for cell in results.cells if cell.builds is not None})
    within = f" among those whose drop is at most {' or '.join(f'{b:g}' for b in bounds)}" if bounds else ""
    lines = [
        f"Latency: geometric mean over {' or '.join(str(n) for n in builds) or 'some'} fresh builds (the baseline: "
        f"as many or more) of their median turns. Speedup: {_denominator(results.cells)}, paired by turns. "
        "Intervals: 95 %, Student's over builds.",
        "Tie: the interval contains 1, or the gain is below 1 % or below the A/A floor, by which the float model "
        f"differs from its own rebuilt twin: use float. Bold: the fastest of a finished cell{within}. Underlined: not "
        "distinguishable from it by the same rule, paired. A searcher stands with the best of its seeds, by the runoff "
        "or without one by its own samples. Builds ok: in that search, for the others in the confirmation. Minutes: "
        "wall-clock of that search.",
        *_scored(results.cells),
        *_reservations(results.cells, bounds),
        floor_note(results.cells),
    ]
    if halves := [cell.name for cell in results.cells if cell.facts.get("halves")]:
        lines.append(
            f"Searches saw one half of the evaluator's data, scores and drops are of the other: {', '.join(halves)}."
        )
    if own := ", ".join(_own(results.cells)):
        lines.append(f"Scores of the float models, with 95 % over images: {own}.")
    if looks := [f"Full evaluations of {cell.name}: {text}." for cell in results.cells if (text := _looks(cell))]:
        lines += ["Full evaluations: those whose metric was measured, seeds added up.", *looks]
    lines += [f"Calibration of {c.name}: {text}." for c in results.cells for text in c.remarks]
    lines += [f"Starts of {c.name}: {text}." for c in results.cells for text in c.cache_remarks]
    return "\n".join([*lines, *filter(None, [partial(results)])])


def _scored(cells: Sequence[CellResults]) -> Iterator[str]:
    """What a drop and its interval are; nothing where nothing was scored."""
    if any(cell.score(FLOAT_ROW) is not None and cell.metric not in CAPPED for cell in cells):
        yield (
            "Drop: loss against the float baseline, positive is worse; its interval: 95 % of the bootstrap over "
            "images, the same draws for both, where the records of single images allow one."
        )


def _reservations(cells: Sequence[CellResults], bounds: Sequence[float]) -> Iterator[str]:
    """What some verdicts and scores do not say."""
    if bounds:
        yield f'"{BEYOND}": the drop breaks the bound of the experiment; however fast it is, it is not to be shipped.'
    if any("failed" in score for cell in cells for score in cell.scores.values()):
        yield f'"{UNSCORED}": its outputs could not be scored (not finite, as a rule); it is not to be shipped.'
    if any(pick.reason.startswith(ACCURACY_ONLY) for cell in cells for pick in cell.picks):
        yield f'"{ACCURACY_ONLY}": the device has no speed at that precision, so such a row is scored and never timed.'
    if names := {metric_name(cell.metric) for cell in cells if cell.metric in CAPPED}:
        yield f"No drop of {', '.join(sorted(names))}: it compares with the float model, whose own value is a cap."


def _looks(cell: CellResults) -> str:
    """How often each search looked at the metric, and how far its proxy agreed; "" where none did."""
    largest = cell.budget
    picks = [p for p in cell.picks if p.rank == 0 and p.budget == largest and p.scored is not None]
    seeds = {method: [p for p in picks if p.method == method] for method in dict.fromkeys(p.method for p in picks)}
    return ", ".join(f"{method} {_looked(found, largest)}{_agreed(found)}" for method, found in seeds.items())


def _looked(seeds: Sequence[Pick], budget: int) -> str:
    return f"{sum(pick.scored or 0 for pick in seeds)} of {budget * len(seeds)}"


def _agreed(seeds: Iterable[Pick]) -> str:
    told = [f"{pick.agreement:+.2f}" for pick in seeds if pick.agreement is not None]
    return f" (rank correlation of proxy and metric {' and '.join(told)})" if told else ""


def _denominator(cells: Iterable[CellResults]) -> str:
    """What the speedups are over, by cell where cells differ."""
    groups: dict[str, list[str]] = {}
    for cell in cells:
        groups.setdefault(_float_baseline(cell), []).append(cell.name)
    if len(groups) <= 1:
        return " ".join(["over the float model", *groups])
    parts = [f"{how} ({', '.join(names)})" for how, names in groups.items()]
    return f"over the float model {', '.join(parts)}"


def _float_baseline(cell: CellResults) -> str:
    backend = cell.facts["backend"]
    precision = backend.get("float_precision")
    if cell.float_measured:
        return f"at {precision}, the fastest float precision by measurement"
    if precision is None:
        return "as it is"
    return f"at {precision} (pinned)" if len(backend.get("float_params", {})) > 1 else f"at {precision}"
