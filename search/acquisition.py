"""Surrogate model of placements: features, regression with uncertainty, and the acquisition of candidates.

Features are the resolved edges, aggregated at several scales. Edges that the same dimensions cover always have the same
precision, so they form one *atom*, whose state is the precision of its edges. Two placements give the same graph
exactly if all atoms have the same states.

The regression is an additive and pairwise Gaussian process for few noisy placements. Rasmussen and Williams 2006,
"Gaussian Processes for Machine Learning": algorithm 2.1 for the posterior, eq. 5.8 for the marginal likelihood. A
linear kernel is Bayesian ridge regression on its features (their section 2.1), so the model is one ridge regression on
point, role, pattern and border features, plus terms that depend only on the distance between two placements.

The acquisition is the expected improvement of Jones, Schonlau, Welch 1998 (J. Global Optim. 13, eq. 15), times the
probability of being feasible (Gardner et al. 2014, "Bayesian optimization with inequality constraints", eq. 6). With
two objectives, it is the expected improvement of the hypervolume (Emmerich, Deutz, Klinkenberg 2011,
"Hypervolume-based expected improvement: monotonicity properties and exact computation", IEEE CEC). Pending proposals
count as measured at their expected value ("kriging believer", Ginsbourger et al. 2010), so that the proposals of a
batch differ.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from itertools import combinations, islice
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.special import ndtr

from search.api import Edge, Placement, Score, Space
from search.archive import Archive, ArchiveEntry
from search.moves import next_inputs

Matrix = npt.NDArray[np.float64]
MAX_ADJACENT_PAIRS = 600
"""Largest number of pairs of adjacent atoms that become features; the most frequent pairs are kept."""


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Features of n placements, a row each. An atom is a set of edges that the same dimensions cover.

    The prior variances of each block sum to about one.

    Attributes:
        states: State of each atom, shape (n, atoms): 0 is float, k the k-th precision of the space.
        roles: For each precision, the share of each role's edges that have it, and the share of the model's
            multiply-accumulates behind such edges; shape (n, precisions x (roles + 1)).
        scopes: For each precision, the weighted share of the edges of each role within each pattern.
        points: One-hot states of the atoms, weighted.
        pairs: For each pair of adjacent atoms, a weight if their states differ, else 0.
        borders: For each pair of roles, the share of its pairs of adjacent atoms whose states differ.
    """

    states: npt.NDArray[np.int8]
    roles: Matrix
    scopes: Matrix
    points: Matrix
    pairs: Matrix
    borders: Matrix

    def __getitem__(self, rows: slice | list[int] | npt.NDArray[np.int64]) -> FeatureRows:
        """Return some of the rows; a slice makes no copy."""
        return FeatureRows(*(getattr(self, part.name)[rows] for part in fields(self)))

    def __len__(self) -> int:
        return len(self.states)

    def keys(self) -> list[bytes]:
        """Return the identity of each row: equal if and only if the resolved edges are equal."""
        return [row.tobytes() for row in self.states]


class FeatureExtractor:
    """Function that returns the features of placements of one space, `FeatureRows` with a row each; it has no state.

    An atom is a set of edges that the same dimensions cover. Atoms are adjacent if a difference in precision needs a
    conversion: two inputs of one node, two readers of one tensor, and two points that follow each other in graph order.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self.precisions = tuple(dict.fromkeys(name for d in space.dimensions for name in d.choices[1:]))
        states = np.zeros((len(space) + 1, max(space.sizes, default=1)), dtype=np.int8)
        for index, dimension in enumerate(space.dimensions):
            for choice, name in enumerate(dimension.choices[1:], start=1):
                states[index, choice] = 1 + self.precisions.index(name)
        self._states = states
        covers: dict[Edge, list[int]] = defaultdict(list)
        for index, dimension in enumerate(space.dimensions):
            for edge in dict.fromkeys(dimension.edges):
                covers[edge].append(index)
        atoms = {cover: number for number, cover in enumerate(dict.fromkeys(map(tuple, covers.values())))}
        members = {edge: atoms[tuple(cover)] for edge, cover in covers.items()}  # atom of each edge
        depth = max(map(len, atoms), default=1)
        padded = [[*cover, *[-1] * (depth - len(cover))] for cover in atoms]
        self._cover = np.array(padded, dtype=np.int64).reshape(len(atoms), depth)  # dimensions of each atom, ascending
        sizes = Counter(members.values())
        count = np.array([float(sizes[number]) for number in range(len(atoms))])  # edges of each atom
        points = [[space.dimensions[index] for index in cover] for cover in atoms]
        cost = np.array([max(d.cost / len(d.edges) for d in point) for point in points]) * count
        # The role and the pattern of an atom are those of a dimension of kind "node_input" if there is one.
        places = [next((i for i, d in enumerate(point) if d.kind == "node_input"), 0) for point in points]
        owner = [cover[place] for cover, place in zip(atoms, places, strict=True)]
        owners = [space.dimensions[index] for index in owner]
        worth = 0.5 * _normalize(count) + 0.5 * _normalize(cost)
        self._roles = np.column_stack([_share_matrix([d.role for d in owners], count), cost[:, None]])
        scopes = [f"{d.group} {d.role}" for d in owners]
        totals: dict[str, float] = defaultdict(float)
        for scope, value in zip(scopes, worth.tolist(), strict=True):
            totals[scope] += value
        self._scopes = _share_matrix(scopes, count) * np.sqrt([*totals.values()])
        self._points = np.sqrt(worth)
        pairs = _count_adjacent(space, members, owner, count)
        self._first, self._second = np.array([*pairs], dtype=np.int64).reshape(len(pairs), 2).T
        instances = np.array([float(number) for number in pairs.values()])
        self._pairs = np.sqrt(_normalize(instances))
        self._borders = _share_matrix(["-".join(sorted((owners[a].role, owners[b].role))) for a, b in pairs], instances)

    def __call__(self, placements: Sequence[Placement]) -> FeatureRows:
        """Return the features of the placements, in their order."""
        encoded = b"".join(bytes(placement.choices) for placement in placements)  # much faster than from tuples
        choices = np.frombuffer(encoded, dtype=np.uint8).reshape(len(placements), len(self._space))
        coded = np.zeros((len(placements), len(self._space) + 1), dtype=np.int8)  # last column: padding of `cover`
        coded[:, :-1] = self._states[np.arange(len(self._space)), choices]
        states = np.zeros((len(placements), len(self._cover)), dtype=np.int8)
        for column in self._cover.T:  # the earlier dimension decides
            states = np.where(states == 0, coded[:, column], states)
        at = [(states == 1 + k).astype(float) for k in range(len(self.precisions))]
        apart = (states[:, self._first] != states[:, self._second]).astype(float)
        return FeatureRows(
            states=states,
            roles=_concatenate([on @ self._roles for on in at], len(placements)),
            scopes=_concatenate([on @ self._scopes for on in at], len(placements)),
            points=_concatenate([on * self._points for on in at], len(placements)),
            pairs=apart * self._pairs,
            borders=apart @ self._borders,
        )


def _count_adjacent(
    space: Space, members: Mapping[Edge, int], owner: Sequence[int], count: Matrix
) -> dict[tuple[int, int], int]:
    """Return how often each pair of adjacent atoms occurs, the most frequent pairs only."""
    together: dict[tuple[str, str], set[int]] = defaultdict(set)
    found: Counter[tuple[int, int]] = Counter()
    for edge, atom in members.items():
        together["tensor", edge.tensor].add(atom)
        together["node", edge.consumer].add(atom)
    together.pop(("node", ""), None)
    for near in together.values():
        found.update(combinations(sorted(near)[:8], 2))
    own = {dimension: atom for atom, dimension in reversed([*enumerate(owner)])}
    for index, after in next_inputs(space).items():
        if index in own and after in own and own[index] != own[after]:
            low, high = sorted((own[index], own[after]))
            found[low, high] += int(min(count[low], count[high]))
    frequent = sorted(found, key=lambda pair: (-found[pair], pair))[:MAX_ADJACENT_PAIRS]
    return {pair: found[pair] for pair in frequent}


def _share_matrix(names: Sequence[str], weights: Matrix) -> Matrix:
    """Return the matrix that maps indicators to weighted shares per name: one column per name, each with sum 1."""
    columns = {name: number for number, name in enumerate(dict.fromkeys(names))}
    sums = np.zeros((len(names), len(columns)))
    for row, name in enumerate(names):
        sums[row, columns[name]] = weights[row]
    shares: Matrix = sums / np.maximum(sums.sum(axis=0), 1e-12)
    return shares


def _normalize(weights: Matrix) -> Matrix:
    return weights / max(float(weights.sum()), 1e-12)


def _concatenate(parts: Sequence[Matrix], rows: int) -> Matrix:
    return np.concatenate(parts, axis=1) if parts else np.zeros((rows, 0))


Vector = npt.NDArray[np.float64]

KERNEL_WEIGHTS = (2.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Relative prior variances of the kernel's parts: roles, scopes, points, pairs, borders, distance. Chosen by predicting
held-out placements of four zoo spaces; the best single part differs by model, and the sum is almost as good."""
ADDITIVE_KERNEL_WEIGHTS = (0.3, 1.0, 2.0, 0.2, 0.2, 0.3)
"""Relative prior variances for the loss of accuracy, in which the effects of points add up more than in latency."""
NUGGET_VARIANCES = (1e-3, 1e-2, 6e-2)
"""Candidates for the variance that no feature explains, relative to that of the observations."""
LARGE_FIT_ROWS = 300
"""Number of rows from which the nugget is chosen only at every `NUGGET_PERIOD`-th fit, because choosing it takes a
Cholesky decomposition per candidate."""
NUGGET_PERIOD = 10


class Regressor(Protocol):
    """Regression that predicts the value of a placement and its standard deviation."""

    def fit(self, rows: FeatureRows, values: Vector, errors: Vector) -> Vector:
        """Fit the model to data, which replace those of earlier fits.

        Args:
            rows: Features of n placements.
            values: Observed values, shape (n,).
            errors: Standard errors of the values, shape (n,); 0 if unknown.

        Returns:
            Expected values of the rows, shape (n,).
        """
        ...

    def predict(self, rows: FeatureRows) -> tuple[Vector, Vector]:
        """Return the expected value and the standard deviation of each row, both of shape (n,); call `fit` first."""
        ...


class GaussianProcess:
    """Gaussian process on features of placements.

    Values are standardised, and the kernel is scaled to explain their variance. The nugget, the variance that no
    feature explains, is chosen by marginal likelihood.

    Args:
        kernel_weights: Relative prior variances of the kernel's parts.
    """

    def __init__(self, kernel_weights: Sequence[float] = KERNEL_WEIGHTS) -> None:
        self._mix = np.array(kernel_weights)
        self._rows: FeatureRows | None = None
        self._nugget = NUGGET_VARIANCES[0]
        self._fits = 0

    def fit(self, rows: FeatureRows, values: Vector, errors: Vector) -> Vector:
        """Fit the model and choose the nugget; arguments and result as in `Regressor.fit`."""
        self._mean, self._scale = float(values.mean()), max(float(values.std()), 1e-9)
        targets, noise = (values - self._mean) / self._scale, (errors / self._scale) ** 2
        self._fits += 1
        nuggets: tuple[float, ...] = NUGGET_VARIANCES
        if self._rows is not None and len(rows) >= LARGE_FIT_ROWS and self._fits % NUGGET_PERIOD:
            nuggets = (self._nugget,)
        self._kernel = plain = self._extend_kernel(rows)
        self._rows = rows
        explained = max(float(np.trace(plain) / len(plain) - plain.mean()), 1e-6)
        self._scaled_mix, kernel = self._mix / explained, plain / explained
        solved = {nugget: _solve(kernel + np.diag(nugget + noise), targets) for nugget in nuggets}
        self._nugget = max(solved, key=lambda nugget: solved[nugget][0])
        _, self._root, self._weights = solved[self._nugget]
        smooth: Vector = self._mean + self._scale * (kernel @ self._weights)
        return smooth

    def _extend_kernel(self, rows: FeatureRows) -> Matrix:
        """Return the kernel of the rows; values of row pairs of the last fit are reused."""
        kernel, keys = np.empty((len(rows), len(rows))), rows.keys()
        places = {} if self._rows is None else {key: place for place, key in enumerate(self._rows.keys())}
        known = [number for number, key in enumerate(keys) if key in places]
        if known:
            before = [places[keys[number]] for number in known]
            kernel[np.ix_(known, known)] = self._kernel[np.ix_(before, before)]
        fresh = [number for number, key in enumerate(keys) if key not in places]
        block = _kernel(rows[fresh], rows, self._mix)
        kernel[:, fresh] = block.T
        kernel[fresh] = block
        return kernel

    def predict(self, rows: FeatureRows) -> tuple[Vector, Vector]:
        """Return the posterior mean and standard deviation of each row.

        Raises:
            ValueError: `fit` was not called.
        """
        if self._rows is None:
            raise ValueError("predict needs a fit first")
        across = _kernel(rows, self._rows, self._scaled_mix)
        inner = solve_triangular(self._root, across.T, lower=True, check_finite=False)
        ones, borders = np.ones(len(rows)), _squared_norms(rows.borders) / max(rows.borders.shape[1], 1)
        scopes, points, pairs = map(_squared_norms, (rows.scopes, rows.points, rows.pairs))
        prior = self._scaled_mix @ np.stack([ones, scopes, points, pairs, borders, ones])
        variance = np.maximum(prior - (inner**2).sum(axis=0), 1e-10)
        return self._mean + self._scale * (across @ self._weights), self._scale * np.sqrt(variance)


def _solve(covariance: Matrix, targets: Vector) -> tuple[float, Matrix, Vector]:
    """Return the log marginal likelihood up to a constant, the Cholesky factor and the weights of the observations."""
    root: Matrix = cholesky(covariance, lower=True, check_finite=False)
    weights: Vector = cho_solve((root, True), targets, check_finite=False)
    evidence = -0.5 * float(targets @ weights) - float(np.log(np.diag(root)).sum())
    return round(evidence, 6), root, weights  # rounded, so that last bits of a BLAS do not change the chosen nugget


def _kernel(a: FeatureRows, b: FeatureRows, mix: Vector) -> Matrix:
    """Return the kernel, shape (rows of a, rows of b): a weighted sum of parts of about unit variance."""
    roles, points = a.roles @ b.roles.T, a.points @ b.points.T
    kernel: Matrix = mix[0] * np.exp(-0.5 * _squared_distances(a.roles, b.roles, roles))
    kernel += mix[2] * points
    borders = mix[4] / max(a.borders.shape[1], 1) * a.borders
    weighted = np.concatenate([mix[1] * a.scopes, mix[3] * a.pairs, borders], axis=1)
    kernel += weighted @ np.concatenate([b.scopes, b.pairs, b.borders], axis=1).T
    kernel += mix[5] * np.exp(-4.0 * np.sqrt(_squared_distances(a.points, b.points, points)))
    return kernel


def _squared_distances(a: Matrix, b: Matrix, products: Matrix) -> Matrix:
    """Return the squared distances of the rows, computed from their inner products."""
    distances: Matrix = np.maximum(_squared_norms(a)[:, None] + _squared_norms(b) - 2 * products, 0.0)
    return distances


def _squared_norms(rows: Matrix) -> Vector:
    squares: Vector = np.einsum("ij,ij->i", rows, rows)
    return squares


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
