"""Check of every file of a results folder against its manifests and checksums, and the repair of damaged ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.results_dir.io import read_json
from harness.results_dir.lines import read_lines
from harness.results_dir.manifest import (
    MANIFEST_FILE,
    FileProblem,
    FileTable,
    find_changed_files,
    list_files,
    read_manifest,
    require_links_inside,
)

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
    "*/rows.json": "move it away; qdq run makes it again from the journals and final_selection.jsonl",
    "*/runs/*": "restore a copy, or move it away; qdq run repeats the search then, with new readings",
    "*": "restore a copy, or move it away; qdq run measures it again",
}
"""How to repair a file, by a pattern of its path in the results folder; the first that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderCheck:
    """Result of a check.

    Attributes:
        files: Number of files that were compared.
        complete: The manifest says that nothing is left to do.
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
        problems=tuple(f"{found}; {_describe_repair(folder, found.path)}" for found in problems),
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
