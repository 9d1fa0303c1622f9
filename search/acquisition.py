"""Acquisition of candidates: expected improvement under constraints and failures.

The expected improvement is that of Jones, Schonlau, Welch 1998 (J. Global Optim. 13, eq. 15), times the probability of
being feasible (Gardner et al. 2014, "Bayesian optimization with inequality constraints", eq. 6). With two objectives,
it is the expected improvement of the hypervolume (Emmerich, Deutz, Klinkenberg 2011, "Hypervolume-based expected
improvement: monotonicity properties and exact computation", IEEE CEC). Pending proposals count as measured at their
expected value ("kriging believer", Ginsbourger et al. 2010), so that the proposals of a batch differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from search.api import Placement, Score, Space
from search.archive import Archive, ArchiveEntry
from search.gaussian_process import ADDITIVE_KERNEL_WEIGHTS, GaussianProcess, Regressor
from search.placement_features import FeatureExtractor, FeatureRows

Vector = npt.NDArray[np.float64]
MAX_TRAINING_ROWS = 300
"""Largest number of scores that the models are fitted to ("subset of datapoints", Rasmussen and Williams 2006, section
8.3.3). It bounds the cost of a proposal, because the cost of a fit grows with the third power of this number."""
MAX_TRAINING_FAILURES = 100
"""Largest number of failures that the failure model is fitted to; the latest are used."""
REFERENCE_MARGIN_SHARE = 0.1
"""Distance of the hypervolume's reference point from the worst values of the front, as a share of their range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquisitionScores:
    """Predictions of the models for a list of candidates.

    Attributes:
        keys: Identity of the resolved edges of each candidate, see `FeatureRows.keys`.
        acquisition: Expected improvement, or expected growth of the hypervolume, times the probabilities that the
            candidate builds and that it satisfies the constraint.
        objective: Expected logarithm of the objective, or the objective itself if one was not positive.
        violation: Expected signed violation, negative inside the bound; 0 if no score violated it so far.
    """

    keys: list[bytes]
    acquisition: Vector
    objective: Vector
    violation: Vector

    def best_new_index(self, known: Set[bytes]) -> int | None:
        """Return the index of the best candidate with a key that is not in `known`, or None if all are known.

        Candidates of an equal acquisition, after rounding, keep their order.
        """
        largest = max(float(self.acquisition.max(initial=0.0)), 1e-300)
        ranking = np.argsort(-np.round(self.acquisition / largest, 9), kind="stable").tolist()
        return next((index for index in ranking if self.keys[index] not in known), None)


class SurrogateModel:
    """Models of the objectives, the violation and the failures, fitted to an archive; one per search.

    Args:
        space: Space of the search.
        model: Constructor of the regressors of the first objective and of failure. The violation and the second
            objective (loss of accuracy) always use a Gaussian process; further objectives are ignored.

    Attributes:
        constrained: Whether a score of the last fit violated the constraint.
        known: Keys (`FeatureRows.keys`) of all placements seen so far.
    """

    def __init__(self, space: Space, model: Callable[[], Regressor] = GaussianProcess) -> None:
        self._features = FeatureExtractor(space)
        self._objective, self._failure = model(), model()
        self._second, self._violation = [GaussianProcess(ADDITIVE_KERNEL_WEIGHTS) for _ in range(2)]
        self.constrained = False
        self._failing = False
        self._best: float | None = None
        self._front: tuple[Vector, Vector] | None = None  # and its reference point; None if there is one objective
        self.known: set[bytes] = set()
        self._seen_count = 0  # number of placements of the archive that are in `known`

    def fit(self, archive: Archive) -> None:
        """Fit all models to an archive with at least one score; pending placements have the predicted objective.

        Above 300 scores, the models are fitted to the best, an even sample and the latest of them; of the failures, the
        latest 100 count.
        """
        self.known.update(self._features([*islice(archive.seen.values(), self._seen_count, None)]).keys())
        self._seen_count = len(archive.seen)
        entries, pending = _select_entries(archive), list(archive.pending.values())
        failed = [observation.placement for observation in [*archive.failures.values()][-MAX_TRAINING_FAILURES:]]
        scored = [*failed, *(entry.placement for entry in entries)]
        tried = self._features([*scored, *pending])
        rows, awaited = tried[len(failed) : len(scored)], tried[len(scored) :]
        scores = [entry.score for entry in entries]
        values = np.array([score.objective for score in scores])
        errors = np.array([score.stderr for score in scores])
        if (values > 0).all():
            values, errors = np.log(values), errors / values
        smooth = self._objective.fit(rows, values, errors)
        believed = np.zeros(0)
        if pending:
            believed, _ = self._objective.predict(awaited)
            errors = np.append(errors, np.zeros(len(pending)))
            smooth = self._objective.fit(tried[len(failed) :], np.append(values, believed), errors)[: len(entries)]
        signed = signed_violations(scores)
        known = [index for index, value in enumerate(signed) if not math.isnan(value)]
        self.constrained = bool((signed[known] > 0).any())
        holding = np.ones(len(pending), dtype=bool)  # pending placements that are expected to satisfy the constraint
        if self.constrained:
            self._violation.fit(rows[known], signed[known], np.zeros(len(known)))
            if pending:
                holding = self._violation.predict(awaited)[0] <= 0
        eligible = np.array([score.violation == 0 and not score.assumed for score in scores])
        # The incumbent's value is the model's prediction, not the measurement, which may be low by chance.
        attained = [*smooth[eligible], *believed[holding]]
        self._best = float(min(attained)) if attained else None
        self._fit_front(rows, scores, smooth, awaited[np.flatnonzero(holding)])
        self._failing = bool(failed)
        if failed:
            outcomes = np.array([1.0] * len(failed) + [0.0] * len(entries))
            self._failure.fit(tried[: len(scored)], outcomes, np.zeros(len(outcomes)))

    def _fit_front(self, rows: FeatureRows, scores: Sequence[Score], firsts: Vector, awaited: FeatureRows) -> None:
        """Fit the second objective, and set the front of all rows that are feasible or expected to be."""
        rated = [n for n, score in enumerate(scores) if len(score.values) > 1]
        holding = [n for n in rated if scores[n].violation == 0]
        self._front = None
        if not holding:
            return
        seconds = np.array([scores[n].values[1] for n in rated])
        self._second.fit(rows[rated], seconds, np.zeros(len(rated)))
        attained = [(firsts[n], scores[n].values[1]) for n in holding]
        if len(awaited):
            attained += zip(self._objective.predict(awaited)[0], self._second.predict(awaited)[0], strict=True)
        self._front = front_with_reference(np.array(attained), np.column_stack([firsts[rated], seconds]))

    def score(self, candidates: Sequence[Placement]) -> AcquisitionScores:
        """Return the predictions for the candidates; call `fit` first."""
        rows = self._features(candidates)
        mean, deviation = self._objective.predict(rows)
        worth, violation = np.ones(len(mean)), np.zeros(len(mean))
        if self._best is not None and self._front is None:
            worth = _expected_improvement(self._best - mean, deviation)
        elif self._best is not None and self._front is not None:
            second, doubt = self._second.predict(rows)
            means, deviations = np.stack([mean, second]), np.stack([deviation, doubt])
            worth = expected_hypervolume_improvement(*self._front, means, deviations)
        if self.constrained:
            violation, doubt = self._violation.predict(rows)
            worth = worth * ndtr(-violation / doubt)
        if self._failing:
            chance, _ = self._failure.predict(rows)
            worth = worth * np.clip(1.0 - chance, 0.0, 1.0)
        return AcquisitionScores(keys=rows.keys(), acquisition=worth, objective=mean, violation=violation)


def _select_entries(archive: Archive) -> list[ArchiveEntry]:
    """Return the entries to train on, in the archive's order.

    Above `MAX_TRAINING_ROWS` entries, half of the rows are the best entries, up to a quarter is an even sample, and the
    rest are the latest. The sample is every entry whose position is a multiple of a power of two, so that it changes
    little from fit to fit.
    """
    entries = list(archive)
    if len(entries) <= MAX_TRAINING_ROWS:
        return entries
    step = 1 << (4 * len(entries) // MAX_TRAINING_ROWS - 1).bit_length()  # at most a quarter of the rows
    chosen = {entry.digest for entry in (*archive.base_entries(MAX_TRAINING_ROWS // 2), *entries[::step])}
    for entry in reversed(entries):
        if len(chosen) >= MAX_TRAINING_ROWS:
            break
        chosen.add(entry.digest)
    return [entry for entry in entries if entry.digest in chosen]


def signed_violations(scores: Sequence[Score]) -> Vector:
    """Return the signed violation of each score: negative inside the bound, NaN if the constraint was not checked.

    `Score.violation` is 0 for all feasible scores. Their distance to the bound comes from the constrained metric, which
    is identified in `Score.metrics`: the one whose difference from the violation, or sum with it, is the same for all
    violating scores; this constant is the bound. One violating score cannot identify the metric if there are several.
    Scores without the metric (for instance because a proxy excluded the placement), or all scores if no metric
    qualifies, keep their violation unchanged.
    """
    plain = np.array([math.nan if score.assumed else score.violation for score in scores])
    broken = [score for score in scores if not score.assumed and score.violation > 0]
    looked_at = [index for index, score in enumerate(scores) if not score.assumed]
    fitting: list[Vector] = []
    sure: list[Vector] = []
    for name in dict.fromkeys(name for score in broken for name in score.metrics):
        having = [index for index in looked_at if name in scores[index].metrics]
        if any(scores[index].violation == 0 for index in set(looked_at) - set(having)):
            continue
        telling = [score for score in broken if name in score.metrics]
        for sign in (-1.0, 1.0):
            bounds = [score.violation - sign * score.metrics[name] for score in telling]
            signed = plain.copy()
            signed[having] = [sign * scores[index].metrics[name] + bounds[0] for index in having]
            tolerance = 1e-9 * max(1.0, abs(bounds[0]))
            fits = max(bounds) - min(bounds) <= tolerance
            if fits and all(signed[i] <= tolerance for i in having if scores[i].violation == 0):
                fitting.append(signed)
                if len({score.violation for score in telling}) > 1:
                    sure.append(signed)
    if sure:
        return sure[0]
    return fitting[0] if len(fitting) == 1 else plain


def front_with_reference(attained: Vector, seen: Vector) -> tuple[Vector, Vector]:
    """Return the Pareto front of feasible points, and a reference point slightly worse than all of it.

    Args:
        attained: Feasible points, shape (points, 2).
        seen: All measured points, shape (points, 2); they set the scale if the front is a single point.
    """
    ordered = attained[np.lexsort((attained[:, 1], attained[:, 0]))]
    lowest = np.minimum.accumulate(ordered[:, 1])
    steps = ordered[np.append(True, ordered[1:, 1] < lowest[:-1])]
    span = np.ptp(steps, axis=0)
    span = np.where(span > 0, span, np.maximum(np.ptp(seen, axis=0), 1e-9))
    return steps, steps.max(axis=0) + REFERENCE_MARGIN_SHARE * span


def expected_hypervolume_improvement(front: Vector, reference: Vector, mean: Vector, deviation: Vector) -> Vector:
    """Return the expected growth of the hypervolume for each candidate.

    The area that the reference point bounds is divided into strips between the points of the front. In each strip the
    expected growth is the product of two independent expected improvements, that of the width and that of the height
    (Yang, Emmerich, Deutz, Baeck 2019, "Efficient computation of expected hypervolume improvement using box
    decomposition algorithms", J. Global Optim. 75, section 3).

    Args:
        front: Non-dominated points, shape (points, 2), the first objective ascending and the second descending.
        reference: Reference point of the hypervolume, in both objectives.
        mean: Expected objectives of the candidates, normal and independent, shape (2, candidates).
        deviation: Standard deviations of the objectives, shape (2, candidates).
    """
    ends = np.append(front[:, 0], reference[0])
    heights = np.append(reference[1], front[:, 1])
    widths = np.diff(_expected_improvement(ends[:, None] - mean[0], deviation[0]), axis=0, prepend=0.0)
    grown: Vector = (widths * _expected_improvement(heights[:, None] - mean[1], deviation[1])).sum(axis=0)
    return grown


def _expected_improvement(gain: Vector, deviation: Vector) -> Vector:
    """Return the expected improvement over the incumbent.

    Args:
        gain: Incumbent's value minus the expected value.
        deviation: Standard deviation of the prediction.
    """
    z = gain / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    improvement: Vector = np.maximum(gain * ndtr(z) + deviation * density, 0.0)
    return improvement
