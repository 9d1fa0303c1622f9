"""Manifest of a results folder: length and digest of each file of finished tasks, and their configuration.

The entry of a task is removed when the task continues and written last. A report has a manifest of its own. Both have a
checksum, as every JSON file. `check_results` compares every file, and names the repair of damaged ones.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from harness.errors import UserError
from harness.records import first_problem
from harness.results_dir.io import explain_write_errors, read_json, write_json
from harness.results_dir.lines import compress_lines, read_lines
from harness.results_dir.termination import TASK_ERROR_FILE

MANIFEST_FILE = "manifest.json"
#: Files and folders of a task that are no results; dashboards write into the Optuna journal.
NON_RESULT_NAMES = frozenset({MANIFEST_FILE, TASK_ERROR_FILE, "work", "optuna.journal"})
MODELS_FOLDER = "models/"
#: Files that may be missing: models in version control, and what the report, `qdq explain` or a run makes again.
OPTIONAL_FILES = (MODELS_FOLDER, "explain/", "graph.json", "patterns.yaml")
MISSING = "missing"
FileTable = Mapping[str, list[Any]]
"""Length in bytes and BLAKE2 digest by path within a folder."""


def _require_inside(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise ValueError(f"{name!r} is no path within the folder")
    return name


_Name = Annotated[str, AfterValidator(_require_inside)]
_Files = dict[_Name, Annotated[list[int | str], Field(min_length=2, max_length=2)]]


class _StoredTask(BaseModel):
    config: str
    complete: bool
    files: _Files


class _StoredManifest(BaseModel):
    """Manifest of results or of a report, which may come from a stranger."""

    model_config = ConfigDict(strict=True)

    files: _Files
    complete: bool = False
    tasks: dict[_Name, _StoredTask] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProblem:
    """File that differs from the manifest, or is missing."""

    path: Path
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


def complete_task(folder: Path, config: str, complete: bool) -> None:
    """Compress the logs of a task and add it to the manifest.

    The next run skips a complete task. Otherwise it would replay the searches; an external searcher such as ModelOpt's
    autotuner needs minutes to generate its models again.

    Args:
        config: Digest of the inputs of the task.
        complete: Whether no work remains.
    """
    for path in (*folder.glob("*.jsonl"), *folder.glob("runs/*.jsonl")):
        compress_lines(path)
    entry = {"config": config, "complete": complete, "files": describe_files(folder, list_files(folder))}
    with _updated_manifest(folder.parent) as manifest:
        manifest["tasks"][folder.name] = entry


def is_complete(folder: Path, config: str) -> bool:
    """Return whether a task is complete for these inputs (`config` of `complete_task`), and has every file.

    Raises:
        UserError: A file is missing or differs from the manifest.
    """
    entry = _task_entry(folder)
    if entry is None or entry.get("config") != config or not entry.get("complete"):
        return False
    for problem in find_changed_files(folder, entry["files"]):
        if problem.problem != MISSING:
            raise UserError(f"{problem}; qdq verify {folder.parent} lists all damage, and how to repair it")
    return all(os.path.exists(folder / name) for name in entry["files"])


def reopen_task(folder: Path) -> None:
    """Remove a task, whose files are about to change, from the manifest."""
    if (folder.parent / MANIFEST_FILE).exists():
        with _updated_manifest(folder.parent) as manifest:
            manifest["tasks"].pop(folder.name, None)


def record_files(folder: Path, paths: Iterable[Path]) -> None:
    """Add or update files of a task in the manifest, unless the task is not in it."""
    if _task_entry(folder) is not None:
        with _updated_manifest(folder.parent) as manifest:
            manifest["tasks"][folder.name]["files"] |= describe_files(folder, paths)


def reopen_results(folder: Path) -> None:
    """Mark a results folder as not complete; files outside of tasks may then change."""
    if (folder / MANIFEST_FILE).exists():
        with _updated_manifest(folder) as manifest:
            manifest |= {"complete": False, "files": {}}


def close_results(folder: Path, tasks: Iterable[str]) -> None:
    """Complete the manifest of a results folder, last of all files."""
    configurations = [path for path in sorted(folder.iterdir()) if path.suffix == ".yaml" and path.is_file()]
    with _updated_manifest(folder) as manifest:
        entries = [manifest["tasks"].get(name) for name in tasks]
        manifest["complete"] = all(entry is not None and entry["complete"] for entry in entries)
        manifest["files"] = describe_files(folder, configurations)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a results folder or a report, or None before there is one.

    Raises:
        UserError: The manifest is damaged.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    body = {"tasks": {}, **read_json(path)}
    try:
        _StoredManifest.model_validate(body)
    except ValidationError as error:
        raise UserError(f"{path}: damaged ({first_problem(error)})") from error
    return body


def describe_files(folder: Path, paths: Iterable[Path]) -> FileTable:
    """Return the length and the digest of files by their path within a folder."""
    return {path.relative_to(folder).as_posix(): _describe_file(path) for path in paths}


def list_files(folder: Path) -> list[Path]:
    """Return the files of a task or a report that a manifest has, sorted."""
    paths = ((path.relative_to(folder), path) for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for name, path in paths if name.parts[0] not in NON_RESULT_NAMES and path.suffix != ".tmp"]


def find_changed_files(folder: Path, files: FileTable, *, models: bool = True) -> Iterator[FileProblem]:
    """Yield each file that is missing or differs from a manifest.

    Args:
        models: Include exported models.
    """
    for name, recorded in files.items():
        path = folder / name
        if os.path.exists(path) and not path.is_file():  # `Path.exists` raises an error for long names
            yield FileProblem(path=path, problem="damaged: no regular file")
        elif not os.path.exists(path):
            if not name.startswith(OPTIONAL_FILES):
                yield FileProblem(path=path, problem=MISSING)
        elif models or not name.startswith(MODELS_FOLDER):
            actual = _describe_file(path)
            if actual[:1] != recorded[:1]:
                yield FileProblem(path=path, problem=f"damaged: {actual[0]} bytes, but {recorded[0]} recorded")
            elif actual != recorded:
                yield FileProblem(path=path, problem="damaged: the content differs from the recorded digest")


def require_links_inside(folder: Path) -> None:
    """Raise `UserError` for a symbolic link in a results folder, maybe a stranger's, that leads out of it.

    Commands would read, or a report would write, files outside of the folder.
    """
    root = os.path.realpath(folder)
    for parent, folders, files in os.walk(folder):
        for path in (os.path.join(parent, name) for name in (*folders, *files)):
            if os.path.islink(path) and os.path.commonpath([root, os.path.realpath(path)]) != root:
                raise UserError(f"{path}: a symbolic link out of the results folder; replace it by what it leads to")


def require_unchanged_results(folder: Path) -> None:
    """Raise `UserError` for a link out of a results folder, or a record that is missing or not that of its manifest."""
    require_links_inside(folder)
    manifest = read_manifest(folder) or {"files": {}, "tasks": {}}
    tables = {folder: manifest["files"], **{folder / name: task["files"] for name, task in manifest["tasks"].items()}}
    for root, table in tables.items():
        for problem in find_changed_files(root, table, models=False):
            raise UserError(f"{problem}; qdq verify {folder} lists all damage, and how to repair it")


def _task_entry(folder: Path) -> dict[str, Any] | None:
    manifest = read_manifest(folder.parent)
    entry: dict[str, Any] | None = None if manifest is None else manifest.get("tasks", {}).get(folder.name)
    return entry


@contextmanager
def _updated_manifest(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the manifest and write it back, while no other thread or process does so."""
    path = folder / MANIFEST_FILE
    with explain_write_errors(path):
        handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # file systems without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        manifest = read_manifest(folder) or {"complete": False, "tasks": {}, "files": {}}
        yield manifest
        write_json(path, manifest)
    finally:
        os.close(handle)


def _describe_file(path: Path) -> list[Any]:
    """Return the length in bytes and the BLAKE2 digest, of 16 bytes."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        return [file.tell(), digest]


REPORT_FOLDER = "report"
REPAIRS: Mapping[str, str] = {
    f"{REPORT_FOLDER}/*": "qdq report {folder} makes it again",
    f"*/{MANIFEST_FILE}": "qdq report {folder} makes it again",
    MANIFEST_FILE: "move it away; qdq run compares nothing then, and writes it again",
    "experiment*.yaml": "restore a copy; nothing makes it again",
    "*/graph.json": "move it away; qdq report {folder} makes it again, if the exported models are there",
    "*/explain/*": "move it away; qdq explain {folder} ROW measures it again",
    "*/models/*": "move it away; qdq run exports it again",
    "*/patterns.yaml": "move it away; qdq run makes it again from the journals",
    "*/task.json": "restore a copy, or repeat the task: qdq run --accept-changes",
    "*/env.json": "restore a copy, or repeat the task: qdq run --accept-changes",
    "*/rows.json": "move it away; qdq run makes it again from the journals and final_selection.jsonl.gz",
    "*/runs/*": "restore a copy, or move it away; qdq run repeats the search then, with new readings",
    "*": "restore a copy, or move it away; qdq run measures it again",
}
"""Advice on the repair of a file by a pattern of its path in the results folder; the first match applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderCheck:
    """Result of a check.

    Attributes:
        files: Number of files that were compared.
        complete: Whether no work remains, according to the manifest.
        problems: One line for each damaged file, with its repair.
    """

    files: int
    complete: bool
    problems: tuple[str, ...]


def check_results(folder: Path) -> FolderCheck:
    """Compare every file of a results folder with its manifest, or with its own checksums if the task is unfinished.

    Raises:
        UserError: The folder is not a results folder.
    """
    if not (folder / "experiment.yaml").is_file():
        raise UserError(f"{folder}: no results here (no experiment.yaml)")
    require_links_inside(folder)
    manifest, problems = _read_manifest(folder)
    tasks: Mapping[str, Mapping[str, FileTable]] = manifest.get("tasks", {})
    tables = {folder: manifest.get("files", {}), **{folder / name: entry["files"] for name, entry in tasks.items()}}
    report, damaged_report = _read_manifest(folder / REPORT_FOLDER)
    tables[folder / REPORT_FOLDER] = report.get("files", {})
    problems += damaged_report
    for root, table in tables.items():
        problems += find_changed_files(root, table)
    problems += _check_unlisted(folder, set(tasks))
    for name, entry in tasks.items():
        listed = {folder / name / file for file in entry["files"]}
        problems += (
            FileProblem(path=path, problem="not in the manifest")
            for path in list_files(folder / name)
            if path not in listed
        )
    return FolderCheck(
        files=sum(map(len, tables.values())),
        complete=bool(manifest.get("complete")),
        problems=tuple(f"{problem}; {_describe_repair(folder, problem.path)}" for problem in problems),
    )


def _read_manifest(folder: Path) -> tuple[dict[str, Any], list[FileProblem]]:
    try:
        return read_manifest(folder) or {}, []
    except UserError as error:
        path = folder / MANIFEST_FILE
        return {}, [FileProblem(path=path, problem=str(error).removeprefix(f"{path}: "))]


def _check_unlisted(folder: Path, listed: set[str]) -> Iterator[FileProblem]:
    """Check the records of tasks that are not in the manifest by their own checksums."""
    tasks = {path.parent for pattern in ("*/env.json", "*/task.json") for path in folder.glob(pattern)}
    for path in (path for task in sorted(tasks) if task.name not in listed for path in list_files(task)):
        try:
            if path.suffix == ".json":
                read_json(path)
            elif ".jsonl" in path.suffixes:
                for _ in read_lines(path):
                    pass
        except UserError as error:
            yield FileProblem(path=path, problem=str(error).removeprefix(f"{path}: "))


def _describe_repair(folder: Path, path: Path) -> str:
    name = path.relative_to(folder).as_posix()
    return next(text for pattern, text in REPAIRS.items() if fnmatch(name, pattern)).format(folder=folder)
