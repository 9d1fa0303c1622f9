"""Submissions to QDQ-Bench: a folder with the searches of some searchers, and the facts that repeat them.

Searches are stored as in `harness.replay.path_cache`: the evaluated placements in order, from which readings follow.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field, ValidationError

from harness.base.errors import DoesNotHold, UserError, suggest_names
from harness.base.files import explain_write_errors, file_sha256, read_json, write_json
from harness.base.progress import Observer
from harness.config.sections import ConfigSection, PluginSpec
from harness.config.yaml_loader import to_user_error
from harness.replay.bench.tasks import TierName, read_catalogue, table_path
from harness.replay.budget_study import MAX_EVALUATIONS_PER_SEARCH, MAX_SEEDS, ReplayedSearcher
from harness.replay.path_cache import FILE, PARTS_FOLDER, PathCache, SearchKey, describe_code, replay_cached, search_key
from harness.replay.replay import ReplayRequest, load_landscape, replay
from harness.results.manifest import MANIFEST_FILE, describe_files, read_manifest, require_unchanged_results
from harness.results.ownership import exclusive_lock

SUBMISSION_FILE = "submission.json"
MAX_NAME_CHARS = 200


def _require_name(name: str) -> str:
    if not (0 < len(name) <= MAX_NAME_CHARS and name.isprintable()):  # half a surrogate pair cannot be written
        raise ValueError(f"the name of a searcher has at most {MAX_NAME_CHARS} printable characters")
    return name


SearcherName = Annotated[str, AfterValidator(_require_name)]


class TaskRecord(ConfigSection):
    """Searches of one searcher on one task.

    Attributes:
        table: SHA-256 of the table.
        asked: Digest of searcher, parameters and initial placements, see `SearchKey`.
        made_of: Digest of table, code and libraries, see `SearchKey`.
        seeds: Number of searches, with seeds from 0.
        searcher_s: Processor time of one search, without builds and measurements, which a replay does not make.
    """

    table: str
    asked: str
    made_of: str
    seeds: Annotated[int, Field(ge=1, le=MAX_SEEDS)]
    searcher_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class SearcherRecord(ConfigSection):
    """A searcher of a submission.

    Attributes:
        use: Name of the searcher, or `module:Class`.
        params: Its parameters.
        budget: Evaluations of one search.
        code: SHA-256 of its code, without comments and docstrings.
        versions: Versions of Python, of this package and of the libraries that the searcher imports.
        tasks: Its tasks by name.
    """

    use: str
    params: dict[str, Any]
    budget: Annotated[int, Field(ge=1, le=MAX_EVALUATIONS_PER_SEARCH)]
    code: str
    versions: dict[str, str | None]
    tasks: Annotated[dict[str, TaskRecord], Field(min_length=1)]

    @property
    def searches(self) -> int:
        """Return the number of searches on all tasks."""
        return sum(task.seeds for task in self.tasks.values())

    def key(self, searcher: str, task: str) -> SearchKey:
        """Return the key of the searches on a task."""
        record = self.tasks[task]
        return SearchKey(task, searcher, record.asked, record.made_of)


class Submission(ConfigSection):
    """Content of `submission.json`: the searchers that a folder enters in the leaderboard of QDQ-Bench, by name."""

    searchers: dict[SearcherName, SearcherRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSearch:
    """Search that was repeated.

    Attributes:
        same: Whether it evaluated the same placements in the same order.
        differences: Differences of code and libraries from those of the submission, or the error of the searcher.
    """

    searcher: str
    task: str
    seed: int
    same: bool
    differences: str


def run_searchers(
    searchers: Sequence[ReplayedSearcher], tier: TierName, out: Path, observer: Observer, *, workers: int = 1
) -> Submission:
    """Replay searchers on the tasks of a tier and add them to a submission; an interrupted run continues.

    If a task had more searches of a searcher before, these are kept.

    Args:
        searchers: The searchers; `seeds` of one replaces the number of the tier.
        tier: Name of the tier.
        out: Folder of the submission.
        observer: Shows progress.
        workers: Number of processes that replay at once.

    Raises:
        UserError: A searcher is unknown, fails, or does not repeat its own search; or the folder cannot be written.
    """
    with exclusive_lock(out, "running a benchmark"), explain_write_errors(out):
        submission = read_submission(out) if (out / SUBMISSION_FILE).exists() else Submission(searchers={})
        for searcher in searchers:
            try:
                _require_name(searcher.name)
            except ValueError as error:
                raise UserError(f"{searcher.name!r}: {error}") from error
            known = submission.searchers.get(searcher.name)
            record = _run_searcher(searcher, known, tier, out, observer, workers)
            submission = Submission(searchers={**submission.searchers, searcher.name: record})
            write_json(out / SUBMISSION_FILE, submission.model_dump())
            files = describe_files(out, [out / SUBMISSION_FILE, out / FILE])
            write_json(out / MANIFEST_FILE, {"complete": True, "tasks": {}, "files": files})
    return submission


def _run_searcher(
    searcher: ReplayedSearcher,
    known: SearcherRecord | None,
    tier: TierName,
    out: Path,
    observer: Observer,
    workers: int,
) -> SearcherRecord:
    """Replay a searcher on the tasks of a tier, and repeat one search of each new task to measure its time."""
    catalogue = read_catalogue()
    budget, requests = max(catalogue.tiers[tier].budgets), dict[SearchKey, ReplayRequest]()
    seeds = range(searcher.seeds or catalogue.tiers[tier].seeds)
    for name, task in catalogue.tasks_of_tier(tier).items():
        table, initial = table_path(name), task.initial
        key = search_key(table, searcher, initial)
        requests[key] = ReplayRequest(searcher=searcher, table=table, seeds=seeds, budget=budget, initial=initial)
    paths, tasks = replay_cached(out, requests, observer, workers=workers), dict[str, TaskRecord]()
    for key, request in requests.items():
        name = key.table
        before = known.tasks.get(name) if known and known.budget == budget else None
        if before is not None and (before.asked, before.made_of) == (key.asked, key.made_of):
            count, spent_s = max(len(seeds), before.seeds), before.searcher_s
        else:
            count, started_s = len(seeds), time.process_time()
            again = replay(load_landscape(request.table), replace(request, seeds=[0]))[0]
            spent_s = time.process_time() - started_s
            if not np.array_equal(again, paths[key][0]):
                raise UserError(f"searcher {searcher.name!r} does not repeat its search of seed 0 on {name}")
        tasks[name] = TaskRecord(
            table=file_sha256(request.table),
            asked=key.asked,
            made_of=key.made_of,
            seeds=count,
            searcher_s=round(spent_s, 3),
        )
    code, libraries = _describe_code(searcher)
    return SearcherRecord(
        use=searcher.use,
        params=searcher.params,
        budget=budget,
        code=code,
        versions={"python": python_version(), "qdq-bench": version("qdq-bench"), **libraries},
        tasks=tasks,
    )


def _describe_code(searcher: PluginSpec) -> tuple[str, dict[str, str | None]]:
    codes, libraries = describe_code(searcher)
    return hashlib.sha256(b"".join(codes)).hexdigest(), libraries


def read_submission(folder: Path) -> Submission:
    """Read a submission and check its files against the manifest, and its tables against the installed ones.

    Raises:
        UserError: A file is missing or damaged, a task is unknown, or its table differs.
    """
    require_unchanged_results(folder)
    if not {SUBMISSION_FILE, FILE} <= (read_manifest(folder) or {"files": {}})["files"].keys():
        raise UserError(f"{folder / MANIFEST_FILE}: no manifest of a submission, which `qdq bench run` writes")
    if parts := sorted((folder / PARTS_FOLDER).glob("*.parquet")):
        raise UserError(f"{parts[0]}: searches of an interrupted run; run `qdq bench run` again, or delete the file")
    body = read_json(folder / SUBMISSION_FILE)
    try:
        submission = Submission.model_validate(body)
    except ValidationError as error:
        raise to_user_error(Submission, str(folder / SUBMISSION_FILE), error) from error
    tasks = read_catalogue().tasks
    if not submission.searchers:
        raise UserError(f"{folder / SUBMISSION_FILE}: no searchers")
    for name, record in submission.searchers.items():
        for task, task_record in record.tasks.items():
            if task not in tasks:
                raise UserError(
                    f"{folder / SUBMISSION_FILE}: {name}: no task is called {task!r}; {suggest_names(task, tasks)}"
                )
            if not table_path(task).is_file() or file_sha256(table_path(task)) != task_record.table:
                raise UserError(
                    f"{folder / SUBMISSION_FILE}: {name} was replayed on another table of {task} than the one at hand"
                )
    return submission


def check_submission(folder: Path, *, searches: int, seed: int, observer: Observer) -> list[CheckedSearch]:
    """Repeat a random sample of the searches of each searcher of a submission.

    Args:
        folder: Folder of the submission.
        searches: Number of searches of each searcher.
        seed: Seed of the sample.
        observer: Shows progress.

    Raises:
        DoesNotHold: A file is missing or damaged.
        UserError: The folder has no submission.
    """
    try:
        submission = read_submission(folder)
    except UserError as error:
        raise (DoesNotHold if (folder / SUBMISSION_FILE).exists() else UserError)(str(error)) from error
    cache, rng, tasks = PathCache(folder), np.random.default_rng(seed), read_catalogue().tasks
    checks = []
    with observer.work("check", searches * len(submission.searchers)) as step:
        for name, record in submission.searchers.items():
            listed = [(task, search_seed) for task, each in record.tasks.items() for search_seed in range(each.seeds)]
            for task, search_seed in (listed[number] for number in rng.permutation(len(listed))[:searches]):
                searcher = PluginSpec(use=record.use, params=record.params, label=name)
                request = ReplayRequest(
                    searcher=searcher, table=table_path(task), seeds=[search_seed], budget=record.budget,
                    initial=tasks[task].initial,
                )  # fmt: skip
                stored, same = cache.paths_by_seed(record.key(name, task)).get(search_seed), False
                try:
                    code, libraries = _describe_code(searcher)
                    path = replay(load_landscape(request.table), request)[search_seed]
                    same = stored is not None and np.array_equal(path, stored.indices[: record.budget])
                    differences = [
                        f"{key} {each}, not {record.versions.get(key)}"
                        for key, each in libraries.items()
                        if record.versions.get(key) != each
                    ]
                    if code != record.code:
                        differences.append("other code of the searcher")
                except UserError as error:
                    differences = [str(error).partition("\n")[0]]
                checks.append(
                    CheckedSearch(
                        searcher=name, task=task, seed=search_seed, same=same, differences=", ".join(differences)
                    )
                )
                step.advance(f"{name} on {task}")
    return checks
