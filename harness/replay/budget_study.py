"""Budget ablation: comparison of searchers at each budget, over many seeds and replayed tables."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from scipy.special import stdtrit

from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.base.progress import Observer
from harness.base.text import pluralize
from harness.config.experiment import as_list
from harness.config.sections import PluginSpec
from harness.config.yaml_loader import read_experiment_yaml, read_text_file, to_user_error
from harness.plugins.registry import installed_plugins
from harness.replay.path_cache import FILE, MAX_EVALUATIONS, replay_cached, search_key
from harness.replay.replay import (
    NEAR_OPTIMUM_SHARE,
    Floats,
    Landscape,
    ReplayRequest,
    initial_models,
    load_landscape,
    optimum_in_initial_design,
)
from harness.replay.simulated_selection import RANDOM_LABEL, Searches, random_search
from harness.report.report_table import ReportTable, format_interval, write_table
from harness.report.statistics import (
    MIN_BLOCKS,
    FriedmanRanks,
    compare_pairs,
    compute_ranks,
    quartiles,
    score_against_random,
    smallest_p_value,
)
from harness.results.ownership import exclusive_lock

TARGET_GAIN_SHARES = (0.95, 0.99)
RISES = (
    "A search is shown at the recorded latency of its final choice, which a simulated final selection makes among its "
    "best readings. Noise may still decide, so the latency may rise with the evaluations."
)
REACH_NOTE = (
    "Evaluations, and recorded minutes of builds and measurements, until a search had that share of the gain from the "
    "float model to the table's optimum: median over {seeds}; those that never had it within {most} evaluations count "
    "as later than all others. In brackets: how many had it, if only for a while. A table without a placement faster "
    "than the float model has no line."
)
SCORE_NOTE = (
    "Share of what random search leaves that a searcher finds, on average until random search itself has found 95 % of "
    "what there is to find, after the initial placements (Willemsen et al. 2024): 0 is random search from the same "
    "start, 1 the optimum at once, and below 0 worse than random. Mean over {seeds} with its 95 % interval "
    "(Student's), because random search is a mean too; a dash if the initial placements leave nothing."
)
_Line = tuple[dict[str, Any], dict[str, Any]]
"""Line of a table: raw figures and formatted cells."""


class TableResult:
    """Replayed searches of a recorded table, and random searches of the same budget.

    Args:
        landscape: The table.
        searches: Searches by searcher.
        budget: Number of evaluations of a search.
        initial: Names of the initial placements.
        block: Block of the table in statistics; "": its name.
        split: Split of the table's task in QDQ-Bench, or "".
        mean_random: Whether to keep only the mean of the random searches, which saves memory.

    Attributes:
        float_ms: Latency relative to which gains are computed: the float model's, or the slowest if that failed.
        random_ms: Latency of random searches, of shape (searches, evaluations).
    """

    def __init__(
        self,
        landscape: Landscape,
        searches: Mapping[str, Searches],
        budget: int,
        initial: Sequence[str],
        *,
        block: str = "",
        split: str = "",
        mean_random: bool = False,
    ) -> None:
        self.name, self.searches, self.split = landscape.table.path.stem, searches, split
        self.block = block or self.name
        self.optimum_ms = float(landscape.latency_ms[landscape.optimum])
        self.float_ms = landscape.anchors_ms.get("float", float(landscape.latency_ms.max()))
        random_ms = random_search(landscape, budget, initial)
        self.random_ms: Floats = random_ms.mean(axis=0, keepdims=True) if mean_random else random_ms
        self._initial_count = len(initial_models(landscape, initial))  # a model counts once

    def latency_ms(self, searcher: str) -> Floats:
        """Return the recorded latency of the choices of a searcher, or of random search, (searches, evaluations)."""
        return self.random_ms if searcher == RANDOM_LABEL else self.searches[searcher].latency_ms

    def regret_percent(self, searcher: str) -> Floats:
        """Return the latency of the choices above the optimum in %, (searches, evaluations)."""
        return 100 * (self.latency_ms(searcher) / self.optimum_ms - 1)

    def scores(self, searcher: str) -> Floats:
        """Return the score of each search against random search."""
        random_ms = self.random_ms.mean(axis=0)
        return score_against_random(self.latency_ms(searcher), random_ms, self.optimum_ms, self._initial_count)


def budget_tables(
    results: Sequence[TableResult], study: BudgetStudy, ranks: Mapping[int, FriedmanRanks]
) -> tuple[ReportTable, ...]:
    """Return all tables of a study.

    The tables of `results` are the blocks of the statistical tests; `ranks` has those of the searchers by budget.
    """
    budgets, names = study.budgets, list(results[0].searches)
    seeds, tables = describe_seed_counts(results, study), pluralize(len(results), "table")
    lines = []
    for name in (RANDOM_LABEL, *names):
        figures = {f"mean_{n}": [r.regret_percent(name)[:, n - 1].mean() for r in results] for n in budgets}
        by_table = [np.nan if name == RANDOM_LABEL else r.scores(name).mean() for r in results]
        lines.append(_mean_line(name, figures | {"score": by_table}))
    means = _make_table(
        "means",
        "In the mean over tables",
        lines,
        "Latency of the incumbent above the optimum in %, and the score against random search: mean over seeds and "
        f"{tables}, {_describe_limits(len(results))} (Student's). Tables are few and differ; the table "
        "pairs compares searchers on one and the same table.",
    )
    found = {
        name: np.array([100 * (r.searches[name].found_ms.mean(axis=0) / r.optimum_ms - 1) for r in results])
        for name in names
    }
    fastest = _make_table(
        "found",
        "Found, chosen or not",
        [_mean_line(name, {f"found_{n}": found[name][:, n - 1] for n in budgets}) for name in names],
        "Latency above the optimum in % of the fastest model that a search had evaluated, chosen or not: mean over "
        f"seeds and {tables}, as in the table means. The rest of the regret in that table is lost in choosing among "
        "noisy readings.",
    )
    budget = _make_table(
        "budget",
        "Budgets",
        [_regret_line(result, name, budgets) for result in results for name in (RANDOM_LABEL, *names)],
        f"Latency of the incumbent above the table's optimum in %: median over {seeds} [quartiles]. "
        f"{pluralize(len(study.initial), 'initial placement')} of every search, also of random search, "
        f"{'counts' if len(study.initial) == 1 else 'count'}. All budgets are read off the same searches. {RISES}",
    )
    reach = _make_table(
        "reach",
        "Time to the gain",
        [_time_to_gain_line(r, name) for r in results if r.float_ms > r.optimum_ms for name in names],
        REACH_NOTE.format(seeds=seeds, most=max(budgets)),
    )
    scores = []
    for result, name in itertools.product(results, names):
        (mean, low, high), line = mean_interval(result.scores(name), 2), {"table": result.name, "searcher": name}
        cells = {**line, "score": format_interval(mean, low, high)}
        scores.append(({**line, "score": mean, "low": low, "high": high}, cells))
    score = _make_table(
        "score",
        "Score against random search",
        scores,
        SCORE_NOTE.format(seeds=seeds),
    )
    return means, fastest, budget, reach, score, _pairwise_table(results, budgets), _rank_table(ranks)


def _make_table(name: str, title: str, lines: Sequence[_Line], note: str) -> ReportTable:
    raw, cells = (pd.DataFrame([line[part] for line in lines]) for part in (0, 1))
    return ReportTable(name=name, title=title, cells=cells, raw=raw, note=note)


def _mean_line(searcher: str, figures: Mapping[str, Sequence[float] | Floats]) -> _Line:
    """Return the line of a searcher: the mean over tables of each figure."""
    line, cells = dict[str, Any](searcher=searcher), dict[str, Any](searcher=searcher)
    for name, values in figures.items():
        mean, low, high = mean_interval(np.asarray(values))
        line |= {name: mean, f"{name}_low": low, f"{name}_high": high}
        budget = name.partition("_")[2]
        cells[f"{budget} evaluations" if budget else name] = format_interval(mean, low, high)
    return line, cells


def _regret_line(result: TableResult, name: str, budgets: Sequence[int]) -> _Line:
    line: dict[str, Any] = {"table": result.name, "searcher": name}
    cells, regrets = dict(line), result.regret_percent(name)
    for budget in budgets:
        middle, low, high = quartiles(regrets[:, budget - 1])
        line |= {f"regret_{budget}": middle, f"lower_{budget}": low, f"upper_{budget}": high}
        line[f"mean_{budget}"] = float(regrets[:, budget - 1].mean())
        cells[f"{budget} evaluations"] = format_interval(middle, low, high)
    return line, cells


def _time_to_gain_line(result: TableResult, name: str) -> _Line:
    """Return evaluations and minutes until each share of the best gain; for searches without it they are infinite."""
    line: dict[str, Any] = {"table": result.name, "searcher": name}
    cells, searches = dict(line), result.searches[name]
    for gain in TARGET_GAIN_SHARES:
        target_ms = result.float_ms - gain * (result.float_ms - result.optimum_ms)
        is_reached = searches.latency_ms <= target_ms
        reached, first = is_reached.any(axis=1), is_reached.argmax(axis=1)
        evaluations = np.where(reached, first + 1, np.inf)
        minutes = np.where(reached, searches.elapsed_s[np.arange(len(first)), first] / 60, np.inf)
        middle, minute = (float(np.quantile(values, 0.5, method="higher")) for values in (evaluations, minutes))
        share, is_finite = f"{100 * gain:.0f}", bool(np.isfinite(middle))
        line |= {
            f"evaluations_{share}": middle if is_finite else None,
            f"minutes_{share}": minute if is_finite else None,
        }
        line[f"reached_{share}"] = int(reached.sum())
        count = f"{middle:.0f}, {minute:.1f} min" if is_finite else f"> {is_reached.shape[1]}"
        cells[f"{share} % of the gain"] = f"{count} ({reached.sum()} of {len(first)})"
    return line, cells


def _pairwise_table(results: Sequence[TableResult], budgets: Sequence[int]) -> ReportTable:
    """Return the comparison of the first searcher with each of the others, at each budget."""
    control, *others = results[0].searches
    frames = []
    for budget in budgets:
        shares = {
            name: {r.name: (r.optimum_ms / r.latency_ms(name)[:, budget - 1]).tolist() for r in results}
            for name in (control, *others)
        }
        frames.append(compare_pairs(shares, control).assign(budget=budget))
    raw = pd.concat(frames, ignore_index=True)
    cells = raw[["budget", "first", "second", "blocks"]].assign(
        ratio=[format_interval(*figures, 3) for figures in zip(raw["ratio"], raw["low"], raw["high"], strict=True)],
        chance=[f"{value:.2f}" for value in raw["chance"]],
        p=[f"{value:.3f}" if np.isfinite(value) else "-" for value in raw["p_holm"]],
    )
    note = (
        f"{control} with each of the others, at each budget. Ratio: of the shares of the optimum's speed, each the "
        f"mean over seeds, {_describe_limits(len(results))}. Chance: that a search of the first ends faster than one "
        "of the second (effect size; 0.5 is none). p: Wilcoxon's signed ranks over tables with Holm's correction for "
        f"all of one budget; the smallest that {pluralize(len(results), 'table')} and "
        f"{pluralize(len(others), 'comparison')} can give is {smallest_p_value(len(results), len(others)):.3g}."
    )
    return ReportTable(name="pairs", title="Pairs", cells=cells, raw=raw, note=note)


def _rank_table(ranks: Mapping[int, FriedmanRanks]) -> ReportTable:
    """Return the mean rank of each searcher at each budget, the best at the largest budget first."""
    most = ranks[max(ranks)]
    columns = {str(budget): [at_budget.mean[name] for name in most.mean] for budget, at_budget in ranks.items()}
    raw = pd.DataFrame({"searcher": list(most.mean), **columns})
    cells = raw.assign(**{budget: [f"{value:.2f}" for value in raw[budget]] for budget in columns})
    test = "too few for a test"
    if most.critical_difference is not None:
        tests = ", ".join(f"{at_budget.p_value:.2g} at {budget}" for budget, at_budget in ranks.items())
        test = (
            f"Friedman p = {tests}; ranks of one budget that differ by more than {most.critical_difference:.2f} are "
            "different at 5 % (Nemenyi)"
        )
    note = (
        f"Mean rank over {pluralize(most.blocks, 'table')} by the latency at each budget, on average over seeds, "
        f"because the medians of many are the optimum; {test}. Tables of one model are related, which the test does "
        "not know."
    )
    return ReportTable(name="ranks", title="Ranks", cells=cells, raw=raw, note=note)


def describe_seed_counts(results: Sequence[TableResult], study: BudgetStudy) -> str:
    """Return the number of seeds of a study as text, with the searchers that had fewer."""
    counts = {name: len(searches.seeds) for name, searches in results[0].searches.items()}
    listed = ", ".join(f"{name}: {count}" for name, count in counts.items() if count != study.seeds)
    return f"{pluralize(study.seeds, 'seed')} ({listed})" if listed else pluralize(study.seeds, "seed")


def _describe_limits(blocks: int) -> str:
    few = f"no interval, for {MIN_BLOCKS} tables are needed"
    return few if blocks < MIN_BLOCKS else "with its 95 % interval over tables"


def mean_interval(values: Floats, least: int = MIN_BLOCKS) -> tuple[float | None, float | None, float | None]:
    """Return mean and limits of Student's 95 % interval; None if a value is NaN; limits None below `least` values."""
    if np.isnan(values).any():
        return None, None, None
    mean = float(values.mean())
    if len(values) < least:
        return mean, None, None
    half = float(stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) / np.sqrt(len(values)))
    return mean, mean - half, mean + half


# Replayed only if a study names them: the first enumerates a table, the Gaussian process of the second takes up to a
# second per proposal, the others need further packages.
EXCLUDED_SEARCHERS = ("exhaustive", "optuna", "smac", "nevergrad", "syne_tune", "kernel_tuner")
MAX_SEEDS = 10_000
MAX_EVALUATIONS_PER_SEARCH = 5_000  # ten thousand random searches of this length take 0.4 GB


def _check_rising(budgets: tuple[int, ...]) -> tuple[int, ...]:
    if list(budgets) != sorted(set(budgets)):
        raise ValueError(f"budgets must increase, but got {list(budgets)}")
    return budgets


class ReplayedSearcher(PluginSpec):
    """A searcher of a study.

    Attributes:
        seeds: Number of searches on each table, fewer for a slow searcher; None: that of the study.
    """

    seeds: Annotated[int, Field(ge=1, le=MAX_SEEDS)] | None = None


class BudgetStudy(BaseModel):
    """Settings of a comparison of searchers at several budgets, on recorded tables.

    Attributes:
        study: Name of the study.
        tables: Files of `qdq bench record`, relative to the study's file; `*` matches existing files.
        searchers: Searchers to replay; empty: all installed ones but `EXCLUDED_SEARCHERS`.
        seeds: Number of searches of each searcher on each table, with seeds 0, 1, ...
        budgets: Evaluations at which searches are compared; searches run to the largest.
        initial: Initial placements of every search (float, all, linear), which count as evaluations; "none" is the
            cold start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    study: str
    description: str = ""
    tables: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    searchers: Annotated[tuple[ReplayedSearcher, ...], Field(strict=False)] = ()
    seeds: Annotated[int, Field(ge=1, le=MAX_SEEDS)] = 100
    budgets: Annotated[
        tuple[Annotated[int, Field(ge=1, le=MAX_EVALUATIONS_PER_SEARCH)], ...],
        Field(strict=False, min_length=1),
        AfterValidator(_check_rising),
    ] = (10, 25, 50, 100, 200)
    initial: Annotated[tuple[str, ...], BeforeValidator(as_list), Field(strict=False)] = ("float", "all", "linear")


def all_searchers() -> tuple[ReplayedSearcher, ...]:
    """Return every installed searcher but `EXCLUDED_SEARCHERS`."""
    return tuple(
        ReplayedSearcher(use=plugin.name)
        for plugin in installed_plugins("searcher")
        if plugin.name not in EXCLUDED_SEARCHERS
    )


def load_study(path: Path) -> BudgetStudy:
    """Read and check a study's file; its tables become paths of existing files."""
    document = read_experiment_yaml(read_text_file(path, "a study file"), str(path))
    try:
        study = BudgetStudy.model_validate(document)
    except ValidationError as error:
        raise to_user_error(BudgetStudy, str(path), error) from None
    found: list[str] = []
    for text in study.tables:
        names = sorted(glob(text, root_dir=path.parent, recursive=True)) if "*" in text else [text]
        if not names:
            raise UserError(f"{path}: tables: no file matches {text!r}; 'qdq bench record MODEL --out FILE' makes one")
        found += [str(path.parent / name) for name in names]
    return study.model_copy(update={"tables": tuple(found)})


def study_budgets(study: BudgetStudy, out: Path, observer: Observer, *, workers: int = 1) -> tuple[ReportTable, ...]:
    """Replay searchers on recorded tables and write the results; an interrupted study continues.

    Tables whose optimum is an initial placement are left out, because all searchers are equal on them.

    Args:
        out: Folder for the tables (means, found, budget, reach, score, pairs, ranks), plots of curves and critical
            differences, and the cache of searches.
        workers: Number of processes that replay at once.
    """
    budget, searchers = max(study.budgets), study.searchers or all_searchers()
    if min(study.budgets) <= len(study.initial):
        first = pluralize(len(study.initial), "initial placement")
        raise UserError(f"budgets must be above the {first}, but got {study.budgets}")
    files = [Path(table) for table in study.tables]
    for what, names in (("tables", [f.stem for f in files]), ("searchers", [s.name for s in searchers])):
        if twice := ", ".join(name for name, count in Counter(names).items() if count > 1):
            raise UserError(f"two {what} have one name: {twice}; rename a table's file, give a searcher a label")
    optimal_starts = {file: optimum_in_initial_design(load_landscape(file), study.initial) for file in files}
    left_out = _describe_excluded_tables(optimal_starts)
    requests = {
        search_key(file, searcher, study.initial): ReplayRequest(
            searcher=searcher,
            table=file,
            seeds=range(searcher.seeds or study.seeds),
            budget=budget,
            initial=study.initial,
        )
        for file in files
        if not optimal_starts[file]
        for searcher in searchers
    }
    if any(file.parent.resolve() == out.resolve() for file in files):
        raise UserError(f"{out}: the folder has the tables, and {FILE} would be read as one; use another --out")
    most = sum(budget * len(request.seeds) for request in requests.values())
    if most > MAX_EVALUATIONS:
        raise UserError(f"{most} evaluations are more than one folder takes; use fewer seeds or tables at a time")
    with exclusive_lock(out, "replaying a study"), explain_write_errors(out):
        searches: dict[Path, dict[str, Searches]] = {}
        for key, paths in replay_cached(out, requests, observer, workers=workers).items():
            file = requests[key].table
            found = Searches(load_landscape(file), paths, budget)
            searches.setdefault(file, {})[key.searcher] = found
        blocks = [TableResult(load_landscape(file), each, budget, study.initial) for file, each in searches.items()]
        ranks = {}
        for n in study.budgets:
            speeds = [
                {name: np.mean(b.optimum_ms / each.latency_ms[:, n - 1]) for name, each in b.searches.items()}
                for b in blocks
            ]
            ranks[n] = compute_ranks(pd.DataFrame(speeds), unit="table")
        warnings = (*left_out, *_describe_exhausted_searchers(blocks, budget))
        tables = [replace(table, warnings=warnings) for table in budget_tables(blocks, study, ranks)]
        for table in tables:
            write_table(table, out)
        _draw_plots(ranks, blocks, study, out)
    return tuple(tables)


def _describe_excluded_tables(optimal_starts: Mapping[Path, str]) -> tuple[str, ...]:
    """Return a warning that names the tables whose optimum is an initial placement.

    Args:
        optimal_starts: Name of the initial placement that is the optimum of a table, or "", by table.

    Raises:
        UserError: All tables are excluded.
    """
    names = ", ".join(f"{table.stem} ({name!r})" for table, name in optimal_starts.items() if name)
    if not names:
        return ()
    reason = (
        f"an initial placement is within {100 * NEAR_OPTIMUM_SHARE:.0f} % of the optimum, so all searchers are equal: "
        f"{names}; start without initial placements there (initial: none, or --cold)"
    )
    if all(optimal_starts.values()):
        raise UserError(f"no table is left: {reason}")
    return (f"Left out: {reason}.",)


def _describe_exhausted_searchers(blocks: Sequence[TableResult], budget: int) -> tuple[str, ...]:
    """Return a warning that names the searchers that ended before the budget."""
    listed = []
    for name in blocks[0].searches:
        evaluations = np.concatenate([block.searches[name].evaluations for block in blocks])
        early = evaluations[evaluations < budget]
        if len(early):
            median = f"in the median after {np.median(early):.0f}"
            listed.append(f"{name} ({len(early)} of {len(evaluations)} searches, {median})")
    if not listed:
        return ()
    return (f"Nothing more to propose before {budget} evaluations: {', '.join(listed)}. Their last choice counts.",)


def _draw_plots(
    ranks: Mapping[int, FriedmanRanks], blocks: Sequence[TableResult], study: BudgetStudy, out: Path
) -> None:
    from harness.report.plots.study_plots import draw_critical_difference, draw_regret  # matplotlib takes a second

    curves = {
        name: np.mean([b.regret_percent(name).mean(axis=0) for b in blocks], axis=0) for name in blocks[0].searches
    }
    draw_regret(curves, f"Mean over {pluralize(len(blocks), 'table')}: {study.study}", out / "curves")
    for budget, ranks_at_budget in ranks.items():
        if len(ranks_at_budget.mean) > 1:
            over = f"{pluralize(ranks_at_budget.blocks, 'table')}, {describe_seed_counts(blocks, study)}"
            draw_critical_difference(
                ranks_at_budget, f"Mean rank after {budget} evaluations, {over}", out / f"ranks-{budget}"
            )
