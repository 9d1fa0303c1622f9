"""Model-guided search: proposes the neighbour of the best placements with the largest expected improvement."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from search.acquisition import FeatureRows, GaussianProcess, SurrogateModel, Vector
from search.api import Placement, Space, check_range
from search.archive import ArchiveSearcher
from search.moves import assign, crossover_by_group, flip, move_sets

ModelKind = Literal["ridge", "forest"]
CANDIDATE_SHARES = (0.6, 0.2, 0.1)
"""Shares of the candidates: moves of blocks and points, crossovers, two to four flips. The rest are random."""


class SurrogateSearcher(ArchiveSearcher):
    """Searcher by Bayesian optimization with a Gaussian process, or a forest, over placements (`search.acquisition`).

    The model of log latency adds up effects of points, of roles, of patterns, of shares of the multiply-accumulates,
    and of pairs of adjacent points with different precisions. Candidates are made from the best few placements by moves
    of blocks (roles, patterns, roles within patterns, readers of their results), moves of points, and crossovers;
    others are random. With two objectives, the best placements are the least crowded of the front, and the expected
    growth of the hypervolume decides.

    Args:
        space: Space to search.
        seed: Seed of all draws.
        model: "ridge": Gaussian process that extends Bayesian ridge regression. "forest": extremely randomized trees of
            scikit-learn, whose standard deviation is the uncertainty; takes about seven times as long.
        startup: Number of scored placements, initial ones included, before the model replaces random draws.
        candidates: Number of candidates compared for one proposal.
        parents: Number of best placements that candidates are made from.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        model: ModelKind = "ridge",
        startup: int = 4,
        candidates: int = 300,
        parents: int = 4,
    ) -> None:
        if model not in get_args(ModelKind):
            raise ValueError(f"model is one of {get_args(ModelKind)}, but got {model!r}")
        check_range("startup", startup, 1)
        check_range("candidates", candidates, 10)
        check_range("parents", parents, 1)
        super().__init__(space, seed)
        self._startup = startup
        self._candidates = candidates
        self._parents = parents
        self._advisor = SurrogateModel(space, GaussianProcess if model == "ridge" else lambda: ExtraTrees(seed))
        self._blocks = tuple(block for stage in move_sets(space) for block in stage)

    def _propose(self) -> Placement | None:
        if len(self._archive) < self._startup:
            return self._neighbour(self._random_placement())
        self._advisor.fit(self._archive)
        candidates = list(dict.fromkeys(self._make_candidates()))
        index = self._advisor.score(candidates).best_new_index(self._advisor.known)
        return self._neighbour(self._archive.best(1)[0].placement) if index is None else candidates[index]

    def _make_candidates(self) -> Iterator[Placement]:
        parents = [entry.placement for entry in self._archive.base_entries(self._parents)]
        moves, children, flips = (int(share * self._candidates) for share in CANDIDATE_SHARES)
        for parent in parents:
            yield from islice(self._single_moves(parent), moves // len(parents))
        for _ in range(children):
            first, second = self._rng.integers(len(parents), size=2)
            yield crossover_by_group(parents[first], parents[second], self._space, self._rng)
        for _ in range(flips):
            parent = parents[int(self._rng.integers(len(parents)))]
            yield flip(parent, self._space, self._rng, int(self._rng.integers(2, 5)))
        for _ in range(self._candidates - moves - children - flips):
            yield self._random_placement()

    def _single_moves(self, parent: Placement) -> Iterator[Placement]:
        most = max(self._space.sizes, default=1)
        for number in self._rng.permutation(len(self._blocks) * most):
            placement = assign(parent, self._blocks[number // most], int(number % most), self._space)
            if placement != parent:
                yield placement


class ExtraTrees:
    """Regressor of extremely randomised trees (Geurts et al. 2006).

    Predictions are the mean and standard deviation over the trees (Hutter, Hoos, Leyton-Brown 2011, SMAC, section 4.1).
    """

    def __init__(self, seed: int, trees: int = 40) -> None:
        from sklearn.tree import ExtraTreeRegressor  # imported late: loading it takes a second

        seeds = np.random.RandomState(seed).randint(np.iinfo(np.int32).max, size=trees)
        self._trees = [ExtraTreeRegressor(min_samples_leaf=2, max_features=0.5, random_state=int(s)) for s in seeds]

    def fit(self, rows: FeatureRows, values: Vector, errors: Vector) -> Vector:
        """Fit all trees as in `search.acquisition.Regressor.fit`; smaller standard errors give larger weights."""
        known = errors[errors > 0]
        typical = float(np.median(known)) if len(known) else 1.0
        columns, weights = _feature_matrix(rows), 1.0 / (1.0 + (errors / typical) ** 2)
        for tree in self._trees:  # the input checks of scikit-learn's forest would take most of the time
            tree.fit(columns, values, sample_weight=weights, check_input=False)
        return self.predict(rows)[0]

    def predict(self, rows: FeatureRows) -> tuple[Vector, Vector]:
        """Return the mean and the standard deviation of the trees' predictions for each row, both of shape (n,)."""
        columns = _feature_matrix(rows)
        votes = np.array([tree.tree_.predict(columns)[:, 0] for tree in self._trees])
        return votes.mean(axis=0), votes.std(axis=0) + 1e-3


def _feature_matrix(rows: FeatureRows) -> npt.NDArray[np.float32]:
    columns = (rows.states, rows.roles, rows.scopes, rows.pairs, rows.borders)
    return np.concatenate(columns, axis=1).astype(np.float32)  # the type that trees compare in
