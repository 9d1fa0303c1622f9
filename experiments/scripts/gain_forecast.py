"""Fit the forecast of `search.gain_forecast` to replayed searches, and print its calibration on held-out models.

    python experiments/scripts/gain_forecast.py [--seeds 8] [--searcher auto]

Takes about ten minutes on one core. The target is the true gain of the best placement between an evaluation and the end
of a search of 100, from the recorded medians; the features are known during the search (readings with noise).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from harness.config.sections import PluginSpec
from harness.replay.replay import Landscape, ReplayRequest, replay
from harness.replay.simulated_selection import Searches
from harness.runtimes.replay import read_table
from search.gain_forecast import FIRST_FORECAST, HORIZON, THRESHOLD_SHARE, WORTHWHILE_GAIN, GainForecast, features

STARTS = (("float", "all", "linear"), ())
DELTAS = (0.05, 0.1, 0.2)


def observations(path: Path, searcher: str, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield one row per evaluation of each search: model, search, features and true further gain."""
    landscape = Landscape(read_table(path))
    for start in STARTS:
        use = PluginSpec(use=searcher)
        request = ReplayRequest(searcher=use, table=path, seeds=range(seeds), budget=HORIZON, initial=start)
        paths = replay(landscape, request)
        walks = Searches(landscape, paths, HORIZON)
        for row, (seed, walk) in enumerate(paths.items()):
            best_ms = np.minimum.accumulate(landscape.latency_ms[walk])
            forecast = GainForecast(budget=HORIZON)
            for number, reading_ms in enumerate(walks.readings_ms[row, : len(walk)].tolist()):
                forecast.tell(reading_ms)
                if number + 1 >= FIRST_FORECAST and number + 1 < HORIZON:
                    yield {
                        "model": path.stem.split("-")[0],
                        "search": (path.stem, start, seed),
                        "evaluations": number + 1,
                        "features": features(number + 1, forecast.evaluations_since_gain, HORIZON - number - 1),
                        "gain": math.log(best_ms[number] / best_ms[-1]),
                    }


def fit(rows: np.ndarray[Any, Any], gains: np.ndarray[Any, Any]) -> tuple[list[float], list[float]]:
    """Return the coefficients of the chance (logistic regression) and of the mean (Poisson regression)."""
    late = (gains > WORTHWHILE_GAIN).astype(float)

    def logistic(weights: np.ndarray[Any, Any]) -> float:
        return float(np.mean(np.logaddexp(0, rows @ weights) - late * (rows @ weights)) + 1e-4 * weights @ weights)

    def poisson(weights: np.ndarray[Any, Any]) -> float:
        return float(np.mean(np.exp(rows @ weights) - gains * (rows @ weights)) + 1e-6 * weights @ weights)

    start = np.zeros(rows.shape[1])
    return [minimize(loss, start).x.round(3).tolist() for loss in (logistic, poisson)]


def main() -> None:
    """Print coefficients and calibration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--searcher", default="auto")
    options = parser.parse_args()
    tables = sorted(Path("results/tables").glob("*.parquet"))
    found = [row for path in tables for row in observations(path, options.searcher, options.seeds)]
    rows = np.array([row["features"] for row in found])
    gains = np.array([row["gain"] for row in found])
    models = np.array([row["model"] for row in found])
    print("all tables:", *fit(rows, gains))
    chance, mean = np.zeros(len(rows)), np.zeros(len(rows))
    for model in sorted(set(models)):
        own = models == model
        logistic, poisson = fit(rows[~own], gains[~own])
        chance[own] = 1 / (1 + np.exp(-rows[own] @ logistic))
        mean[own] = np.exp(rows[own] @ poisson)
    print("| expected further gain | evaluations | observed mean |\n|---|---|---|")
    for low, high in ((0, 0.002), (0.002, 0.005), (0.005, 0.01), (0.01, 0.02), (0.02, 0.05), (0.05, 1)):
        there = (mean >= low) & (mean < high)
        if there.any():
            print(f"| {low:.1%} to {high:.1%} | {there.sum()} | {gains[there].mean():.1%} |")
    print("| stop at | stopped | at evaluation | later gain above 0.5 % | mean later gain |\n|---|---|---|---|---|")
    for delta in DELTAS:
        stops: dict[Any, int] = {}
        for index, row in enumerate(found):
            if chance[index] < THRESHOLD_SHARE * delta:
                stops.setdefault(row["search"], index)
        at = list(stops.values())
        ends = [found[index]["evaluations"] for index in at] + [HORIZON] * (len({r["search"] for r in found}) - len(at))
        late = gains[at]
        print(f"| {1 - delta:.0%} | {len(at)} of {len({r['search'] for r in found})} | {np.mean(ends):.0f} | "
              f"{np.mean(late > WORTHWHILE_GAIN):.1%} | {late.mean():.2%} |")  # fmt: skip


if __name__ == "__main__":
    main()
