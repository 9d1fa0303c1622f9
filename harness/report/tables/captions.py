"""What stands below a table whatever its figures are; the first two sentences are its caption in a paper."""

from __future__ import annotations

__all__ = [
    "BUDGET_NOTE",
    "COST_NOTE",
    "DECISION_NOTE",
    "FINALIST_NOTE",
    "LOSS_NOTE",
    "PRECISION_NOTE",
    "RUNNER_UP_NOTE",
    "SEARCH_LATENCY_NOTE",
    "TARGET_NOTE",
    "VARIANCE_NOTE",
]  # fmt: skip

BUDGET_NOTE = (
    "Confirmed speedup over the float baseline of the incumbent after so many evaluations: median over seeds "
    "[95 % interval of the median; where there are fewer than six seeds, from the lowest to the highest limit of their "
    "own 95 % intervals]. Bold: the highest median of a cell at a budget; underlined: its interval meets that of the "
    "highest. An incumbent holds the bound on accuracy by what its search saw; what is left of that stands in the main "
    "table."
)
FINALIST_NOTE = (
    "Every placement that a search sent to the confirmation at its largest budget. The main table shows the best seed "
    "of each searcher by its runoff, or without one by its own samples, never by the confirmed ones. Shrinkage: "
    "speedup by the search's own samples less the confirmed one. Brackets as in the main table."
)
RUNNER_UP_NOTE = (
    "METHOD #2: the second best of a search, by its runoff where there was one, else by its own samples (of a front: "
    "by the area that it dominates)."
)
LOSS_NOTE = (
    "The searches minimised the loss of accuracy, and no runoff was held: what is best or second best of their choices "
    "is so by the loss that they saw, of equal ones by their own samples."
)
COST_NOTE = (
    "The seeds of a searcher together, wall-clock from the first proposal; composing, calibration, runoff and "
    "confirmation are not in it. Build: with letting go of the engines, where the run recorded it. Harness: the share "
    "outside build, sampling, evaluation and failed candidates; search: the part of that which is the searcher's own "
    "work. Where several workers build at once their times add up to more "
    "than passes, and harness may read 0. Readings saved: by racing, an estimate, as a share of those "
    "that would have been taken. Built again: candidates that beat the incumbent by more than noise. Taken again: "
    "candidates whose first readings drifted or were disturbed, those built again for it included; unsteady: the last "
    "ones too, or they never warmed up."
)
DECISION_NOTE = (
    "Decision: to ship is what is faster than the float baseline beyond the noise and keeps the bound on accuracy; the "
    "drop itself counts, not its interval. Where nothing was scored, or no bound was set, a row is faster and no more: "
    "look at its accuracy first."
)
PRECISION_NOTE = f"{DECISION_NOTE} Figures, brackets, bold and underlined as in the main table."
SEARCH_LATENCY_NOTE = (
    "A placement is as fast as the median of what the searches of the cell read of it, so that one that several of "
    "them came to, a start for instance, stands at one level."
)
TARGET_NOTE = (
    "Evaluations (minutes) until the incumbent had this share of the best gain that any search of the cell found: "
    "median over seeds, range of the evaluations in brackets where seeds are several, and how many of them came so "
    "far. How fast an incumbent is says the confirmation, of what was not confirmed the runoff, of what was in neither "
    "the median of the searches' readings, at most the best gain; what the incumbent is say the search's own readings, "
    'so that one whose choice only the runoff showed to be that fast stands as "never". Initial placements count. The '
    "best gain is that of what was confirmed; cells where its interval reaches down to the A/A floor have no line, for "
    "nothing sure was found there."
)
VARIANCE_NOTE = (
    "Relative standard deviation of single inferences within a turn, of turns within a build, and of fresh builds: "
    "nested analysis of variance on logarithms, median over the rows of a cell."
)
