"""Acquisition of candidates: expected improvement under constraints and failures.

Jones, Schonlau, Welch 1998 (J. Global Optim. 13, eq. 15) for the improvement; Gardner et al. 2014 ("Bayesian
optimization with inequality constraints", eq. 6) for its product with the probability of being feasible. With two
objectives, the improvement is that of the hypervolume (Emmerich, Deutz, Klinkenberg 2011, "Hypervolume-based expected
improvement: monotonicity properties and exact computation", IEEE CEC). Pending proposals count as measured at their
expected value ("kriging believer", Ginsbourger et al. 2010), so that a batch spreads.
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

__all__ = [
    "AcquisitionScores", "ParetoFront", "SurrogateModel", "expected_hypervolume_improvement",
    "front_with_reference", "signed_violations",
]  # fmt: skip

Vector = npt.NDArray[np.float64]
MAX_TRAINING_ROWS = 300
"""Scores that the models are fitted to at most ("subset of datapoints", Rasmussen and Williams 2006, section 8.3.3), so
that the cost of a proposal is bounded; fits to all grow with the third power of their number."""
MAX_TRAINING_FAILURES = 100
"""Failures that the models are fitted to at most, the latest."""
REFERENCE_MARGIN_SHARE = 0.1
"""How far the reference point of the hypervolume lies behind the worst of the front, as a share of its range."""


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """Pareto front attained so far in two objectives.

    Attributes:
        points: Non-dominated points, shape (points, 2), the first objective ascending and the second descending.
        reference: Reference point of the hypervolume, in both objectives.
    """

    points: Vector
    reference: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquisitionScores:
    """Predictions of the models for a list of candidates.

    Attributes:
        keys: Identity of the resolved edges of each candidate.
        acquisition: Expected improvement, or expected growth of the hypervolume, times the probabilities that the
            candidate builds and that it satisfies the constraint.
        objective: Expected logarithm of the objective, or the objective itself if one was not positive.
        violation: Expected signed violation, negative inside the bound; zeros if no score violated it.
    """

    keys: list[bytes]
    acquisition: Vector
    objective: Vector
    violation: Vector

    def best_new_index(self, known: Set[bytes]) -> int | None:
        """Return the index of the best candidate whose resolved edges are not in `known`, or None if all are."""
        return next((index for index in self.ranking if self.keys[index] not in known), None)

    @property
    def ranking(self) -> list[int]:
        """Return the candidate indices, best first; values that differ in the last bits only keep their order."""
        largest = max(float(self.acquisition.max(initial=0.0)), 1e-300)
        return [int(index) for index in np.argsort(-np.round(self.acquisition / largest, 9), kind="stable")]


class SurrogateModel:
    """Models of the objectives, the violation and the failures, fitted to an archive; one per search.

    Args:
        space: Space of the search.
        model: Makes the regressors of objective and failure. The violation and a second objective (loss of accuracy)
            always have a Gaussian process. Of more than two objectives, the first two count.
    """

    def __init__(self, space: Space, model: Callable[[], Regressor] = GaussianProcess) -> None:
        self._features = FeatureExtractor(space)
        self._objective, self._failure = model(), model()
        self._second, self._violation = (
            GaussianProcess(ADDITIVE_KERNEL_WEIGHTS),
            GaussianProcess(ADDITIVE_KERNEL_WEIGHTS),
        )
        self.constrained = False  # whether a constraint was broken so far
        self._failing = False
        self._best: float | None = None
        self._front: ParetoFront | None = None  # None where there is one objective
        self.known: set[bytes] = set()
        self._seen_count = 0  # of the placements in `known`

    def fit(self, archive: Archive) -> None:
        """Fit all models to an archive with at least one score; pending placements count as evaluated.

        Above `MAX_TRAINING_ROWS` scores, the models see a subset (`_select_entries`), and of the failures the latest.
        """
        self.known.update(self._features([*islice(archive.seen.values(), self._seen_count, None)]).keys())
        self._seen_count = len(archive.seen)
        entries, pending = _select_entries(archive), list(archive.pending.values())
        failed = [observation.placement for observation in [*archive.failures.values()][-MAX_TRAINING_FAILURES:]]
        scored = [*failed, *(entry.placement for entry in entries)]
        tried = self._features([*scored, *pending])
        rows, awaited = tried[len(failed) : len(scored)], tried[len(scored) :]
        scores = [entry.score for entry in entries]
        values, errors = _log_objectives(scores)
        smooth = self._objective.fit(rows, values, errors)
        believed = np.zeros(0)
        if pending:
            believed, _ = self._objective.predict(awaited)
            errors = np.append(errors, np.zeros(len(pending)))
            smooth = self._objective.fit(tried[len(failed) :], np.append(values, believed), errors)[: len(entries)]
        self._fit_violations(rows, scores)
        eligible = np.array([score.violation == 0 and not score.assumed for score in scores])
        # A lucky reading is no incumbent: what the model makes of it is.
        holding = self._predicted_feasible(awaited)
        attained = [*smooth[eligible], *believed[holding]]
        self._best = float(min(attained)) if attained else None
        self._fit_front(rows, scores, smooth, awaited[np.flatnonzero(holding)])
        self._failing = bool(failed)
        if failed:
            outcomes = np.array([1.0] * len(failed) + [0.0] * len(entries))
            self._failure.fit(tried[: len(scored)], outcomes, np.zeros(len(outcomes)))

    def _predicted_feasible(self, awaited: FeatureRows) -> npt.NDArray[np.bool_]:
        """Return a mask of the pending rows that are expected to satisfy the constraint."""
        if not self.constrained or not len(awaited):
            return np.ones(len(awaited), dtype=bool)
        holding: npt.NDArray[np.bool_] = self._violation.predict(awaited)[0] <= 0
        return holding

    def _fit_front(self, rows: FeatureRows, scores: Sequence[Score], firsts: Vector, awaited: FeatureRows) -> None:
        """Fit the second objective, and set the front of feasible and expectedly feasible rows."""
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

    def _fit_violations(self, rows: FeatureRows, scores: Sequence[Score]) -> None:
        signed = signed_violations(scores)
        known = [index for index, value in enumerate(signed) if not math.isnan(value)]
        self.constrained = bool((signed[known] > 0).any())
        if self.constrained:
            self._violation.fit(rows[known], signed[known], np.zeros(len(known)))

    def score(self, candidates: Sequence[Placement]) -> AcquisitionScores:
        """Return the predictions for the candidates; call `fit` first."""
        rows = self._features(candidates)
        mean, deviation = self._objective.predict(rows)
        worth = self._acquisition(rows, mean, deviation)
        violation = np.zeros(len(mean))
        if self.constrained:
            violation, doubt = self._violation.predict(rows)
            worth = worth * ndtr(-violation / doubt)
        if self._failing:
            chance, _ = self._failure.predict(rows)
            worth = worth * np.clip(1.0 - chance, 0.0, 1.0)
        return AcquisitionScores(keys=rows.keys(), acquisition=worth, objective=mean, violation=violation)

    def _acquisition(self, rows: FeatureRows, mean: Vector, deviation: Vector) -> Vector:
        if self._best is None:
            return np.ones(len(mean))
        if self._front is None:
            return _expected_improvement(self._best - mean, deviation)
        second, doubt = self._second.predict(rows)
        return expected_hypervolume_improvement(self._front, np.stack([mean, second]), np.stack([deviation, doubt]))


def _select_entries(archive: Archive) -> list[ArchiveEntry]:
    """Return the entries to train on, in their order: all, or the best half, an even sample, and the latest.

    The sample is every entry whose position is a multiple of a power of two, and so changes little from fit to fit.
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
    """Return by how much each score breaks the constraint: negative inside the bound, NaN if it was not checked.

    A violation alone gives the distance to the bound only for scores beyond it. The metric behind the constraint is the
    one in `Score.metrics` whose distance from the violation is the same for all violating scores; that distance is the
    bound. One violating score cannot identify the metric if there are several. If no metric qualifies, or a score lacks
    it (for instance because a proxy excluded the placement), its violation is returned unchanged.
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


def front_with_reference(attained: Vector, seen: Vector) -> ParetoFront:
    """Return the Pareto front of points and a reference point slightly worse than the front in both objectives.

    Args:
        attained: Feasible points, shape (points, 2).
        seen: All measured points, shape (points, 2); they set the scale if the front is a single point.
    """
    ordered = attained[np.lexsort((attained[:, 1], attained[:, 0]))]
    lowest = np.minimum.accumulate(ordered[:, 1])
    steps = ordered[np.append(True, ordered[1:, 1] < lowest[:-1])]
    span = np.ptp(steps, axis=0)
    span = np.where(span > 0, span, np.maximum(np.ptp(seen, axis=0), 1e-9))
    return ParetoFront(steps, steps.max(axis=0) + REFERENCE_MARGIN_SHARE * span)


def expected_hypervolume_improvement(front: ParetoFront, mean: Vector, deviation: Vector) -> Vector:
    """Return the expected growth of the hypervolume for each candidate.

    The area left of the reference point is divided into strips between the steps of the front. In each strip the growth
    is a width times a height, which are independent, and each is an expected improvement (Yang, Emmerich, Deutz, Baeck
    2019, "Efficient computation of expected hypervolume improvement using box decomposition algorithms", J. Global
    Optim. 75, section 3).

    Args:
        mean: Expected objectives of the candidates, shape (2, candidates), normal and independent.
        deviation: Their standard deviations, shape (2, candidates).
    """
    ends = np.append(front.points[:, 0], front.reference[0])
    heights = np.append(front.reference[1], front.points[:, 1])
    widths = np.diff(_expected_improvement(ends[:, None] - mean[0], deviation[0]), axis=0, prepend=0.0)
    grown: Vector = (widths * _expected_improvement(heights[:, None] - mean[1], deviation[1])).sum(axis=0)
    return grown


def _log_objectives(scores: Sequence[Score]) -> tuple[Vector, Vector]:
    values = np.array([score.objective for score in scores])
    errors = np.array([score.stderr for score in scores])
    return (np.log(values), errors / values) if (values > 0).all() else (values, errors)


def _expected_improvement(gain: Vector, deviation: Vector) -> Vector:
    """Return the expected improvement over the incumbent, for minimization."""
    z = gain / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    improvement: Vector = np.maximum(gain * ndtr(z) + deviation * density, 0.0)
    return improvement
