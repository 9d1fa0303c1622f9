"""Manifest of a results folder: length and digest of the experiment and of each file of its tasks.

It is written with the first file. While a task is not finished, the digest of a record is replaced with the record, and
that of a log is of the lines that it had when it was opened or closed last. A report has a manifest of its own. Both
have a checksum, as every JSON file. `qdq verify`, `qdq report` and `qdq run` compare the files in the same way.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from harness.base.errors import UserError
from harness.base.files import (
    DamagedFile,
    archive_existing,
    explain_write_errors,
    open_regular,
    read_json,
    write_json,
)
from harness.results.journal import FingerprintMismatch, check_journal, require_same_fingerprint
from harness.results.lines import COMPRESSED_SUFFIX, compress_lines, read_lines

MANIFEST_FILE = "manifest.json"
EXPERIMENT_FILE = "experiment.yaml"
TASK_ERROR_FILE = "stopped.txt"
#: Files and folders of a task that are no results; dashboards write into the Optuna journal.
NON_RESULT_NAMES = frozenset({MANIFEST_FILE, TASK_ERROR_FILE, "work", "optuna.journal"})
MODELS_FOLDER = "models/"
UNRECORDED_FOLDERS = (MODELS_FOLDER, "wrong_result/")  # of a task that is not finished, because a run writes them again
#: Files that may be missing: models in version control, and what the report, `qdq explain` or a run makes again.
OPTIONAL_FILES = (MODELS_FOLDER, "explain/", "graph.json", "patterns.yaml")
MISSING, UNLISTED = "missing", "not in the manifest"
FileTable = Mapping[str, list[Any]]
"""Length in bytes and BLAKE2 digest by path within a folder."""


def _require_inside(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise ValueError(f"{name!r} is no path within the folder")
    return name


_Name = Annotated[str, AfterValidator(_require_inside)]
_Files = dict[_Name, Annotated[list[int | str], Field(min_length=2, max_length=2)]]


_EMPTY: Mapping[str, Any] = {"complete": False, "tasks": {}, "files": {}}


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


def complete_task(folder: Path, config: str, complete: bool) -> None:
    """Compress the logs of a task and mark it as finished in the manifest.

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
    """Return whether a task is complete for these inputs (`config` of `complete_task`), and has every file."""
    entry = _task_entry(folder)
    if entry.get("config") != config or not entry.get("complete"):
        return False
    return all(os.path.exists(folder / name) for name in entry["files"])


def reopen_task(folder: Path) -> None:
    """Mark a task as not finished, and record the files that it has now; its models and pictures may change."""
    names = [path for path in list_files(folder) if not _name_in(folder, path).startswith(UNRECORDED_FOLDERS)]
    with _updated_manifest(folder.parent) as manifest:
        manifest["tasks"][folder.name] = {"config": "", "complete": False, "files": describe_files(folder, names)}


def archive_task(folder: Path) -> Path:
    """Rename the folder of a task, and its entry in the manifest, to the next unused name NAME.1, NAME.2, ..."""
    backup = archive_existing(folder)
    with _updated_manifest(folder.parent) as manifest:
        if (entry := manifest["tasks"].pop(folder.name, None)) is not None:
            manifest["tasks"][backup.name] = entry
    return backup


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Record the new digest of a task's file in the manifest after the body, which replaces or removes the file.

    The old digest is removed before, so that a crash leaves a file that is checked by its own checksum. A file outside
    of a results folder is not recorded.
    """
    _record(path, drop=True)
    try:
        yield
    finally:
        _record(path)


@contextmanager
def recorded_log(path: Path) -> Iterator[None]:
    """Record the lines of an open log, to which the body appends, before and after it; more may follow."""
    _record(path)
    try:
        yield
    finally:
        _record(path)


def write_record(path: Path, body: Any) -> None:
    """Write a JSON file of a task, see `write_json`, and record its digest in the manifest."""
    with recorded(path):
        write_json(path, body)


def record_or_check(
    path: Path, facts: dict[str, Any], decisive: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
) -> None:
    """Write the facts of a run when it starts; raise `FingerprintMismatch` if decisive ones changed since.

    Args:
        path: File of the facts.
        facts: Facts of the run.
        decisive: Function that returns the facts that must not change.
    """
    if path.exists():
        require_same_fingerprint(path, decisive(read_json(path)), decisive(facts))
    else:
        write_record(path, facts)


def _record(path: Path, *, drop: bool = False) -> None:
    """Update or remove the manifest's entry of a file in the folder of a task, or in a folder of that."""
    root = next((root for root in (*path.parents[1:3],) if (root / MANIFEST_FILE).exists()), None)
    if root is None or not (root / EXPERIMENT_FILE).exists():
        return
    task = root / path.relative_to(root).parts[0]
    listed = _task_entry(task)["files"]
    names = {_name_in(task, each) for each in (path, path.with_name(f"{path.name}{COMPRESSED_SUFFIX}"))}
    found = {} if drop or not path.is_file() else dict(describe_files(task, [path]))
    if found == {name: listed[name] for name in names & listed.keys()}:
        return
    with _updated_manifest(root) as manifest:
        entry = manifest["tasks"].setdefault(task.name, {"config": "", "complete": False, "files": {}})
        entry["files"] = {name: each for name, each in entry["files"].items() if name not in names} | found


def _name_in(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def reopen_results(folder: Path, files: Iterable[Path] = ()) -> None:
    """Mark a results folder as not complete; of the files outside of tasks, record only these."""
    with _updated_manifest(folder) as manifest:
        manifest |= {"complete": False, "files": describe_files(folder, files)}


def close_results(folder: Path, tasks: Iterable[str]) -> None:
    """Complete the manifest of a results folder, last of all files."""
    configurations = [path for path in sorted(folder.iterdir()) if path.suffix == ".yaml" and path.is_file()]
    with _updated_manifest(folder) as manifest:
        entries = [manifest["tasks"].get(name) for name in tasks]
        manifest["complete"] = all(entry is not None and entry["complete"] for entry in entries)
        manifest["files"] = describe_files(folder, configurations)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a results folder or a report, or None before there is one."""
    path = folder / MANIFEST_FILE
    if not os.path.lexists(path):
        return None
    return {"tasks": {}, **read_json(path, schema=_StoredManifest)}


def describe_files(folder: Path, paths: Iterable[Path]) -> FileTable:
    """Return the length and the digest of files by their path within a folder."""
    return {path.relative_to(folder).as_posix(): _describe_file(path) for path in paths}


def list_files(folder: Path) -> list[Path]:
    """Return the files of a task or a report that a manifest has, sorted."""
    paths = ((path.relative_to(folder), path) for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for name, path in paths if name.parts[0] not in NON_RESULT_NAMES and path.suffix != ".tmp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProblem:
    """File that differs from the manifest or is damaged, is missing, or is not in the manifest.

    Attributes:
        where: Place in the file, such as "line 3"; "" for the whole file.
    """

    path: Path
    problem: str
    where: str = ""

    @classmethod
    def of_error(cls, path: Path, error: UserError) -> FileProblem:
        """Return the problem that an error on reading a file states."""
        if isinstance(error, DamagedFile):
            return cls(path=error.path, problem=error.problem, where=error.where)
        return cls(path=path, problem=str(error).removeprefix(f"{path}: "))

    def describe(self, root: Path) -> str:
        """Return one line with the file, the problem and the repair, for a file of the results folder `root`."""
        name = _name_in(root, self.path)
        repair = next(text for pattern, text in REPAIRS.items() if fnmatch(name, pattern)).format(folder=root)
        if self.problem == UNLISTED:
            repair = "remove it, because no run wrote it"
        elif not repair.startswith("restore"):
            repair = f"restore a copy{'; otherwise' if self.problem == MISSING else ', or move it away:'} {repair}"
        return f"{self.path}{', ' if self.where else ''}{self.where}: {self.problem}; {repair}"


def find_changed_files(folder: Path, files: FileTable, *, models: bool = True) -> Iterator[FileProblem]:
    """Yield each file that is missing or differs from a manifest; a plain log may have more lines.

    Args:
        models: Include exported models.
    """
    for name, recorded in files.items():
        path = folder / name
        other = path.with_suffix("") if path.suffix == COMPRESSED_SUFFIX else Path(f"{path}{COMPRESSED_SUFFIX}")
        if not os.path.lexists(path):  # `Path.exists` raises an error for long names
            if ".jsonl" in path.suffixes and os.path.lexists(other):  # a crash while it was compressed or restored
                yield from _check_content(other)
            elif not name.startswith(OPTIONAL_FILES):
                yield FileProblem(path=path, problem=MISSING)
        elif not path.is_file():
            yield FileProblem(path=path, problem="damaged: no regular file")
        elif models or not name.startswith(MODELS_FOLDER):
            is_log = path.suffix == ".jsonl"
            try:
                actual = _describe_file(path, recorded[0] if is_log else None)
            except UserError as error:
                yield FileProblem.of_error(path, error)
                continue
            if actual == recorded:
                yield from _check_content(path) if is_log else ()  # it may have more lines than recorded
                continue
            problem = "the content differs from the recorded digest"
            if actual[0] != recorded[0]:
                problem = f"{actual[0]} bytes, but {recorded[0]} recorded"
            content = _check_content(path) if ".jsonl" in path.suffixes else iter(())
            yield next(content, FileProblem(path=path, problem=f"damaged: {problem}"))


def _check_content(path: Path) -> Iterator[FileProblem]:
    """Yield the problem of a record by its own checksums, if it has one."""
    try:
        if path.suffix == ".json":
            read_json(path)
        elif ".jsonl" in path.suffixes:
            plain = path.with_suffix("") if path.suffix == COMPRESSED_SUFFIX else path
            if path.parent.name == "runs":
                check_journal(plain)
            for _ in read_lines(plain):
                pass
    except UserError as error:
        yield FileProblem.of_error(path, error)


def require_links_inside(folder: Path) -> None:
    """Raise `UserError` for a symbolic link in a results folder, maybe a stranger's, that leads out of it.

    Commands would read, or a report would write, files outside of the folder.
    """
    root = os.path.realpath(folder)
    for parent, folders, files in os.walk(folder):
        for path in (os.path.join(parent, name) for name in (*folders, *files)):
            if os.path.islink(path) and os.path.commonpath([root, os.path.realpath(path)]) != root:
                raise UserError(f"{path}: a symbolic link out of the results folder; replace it by what it leads to")


def find_problems(root: Path, task: str | None = None, *, whole: bool = True) -> list[FileProblem]:
    """Return the damaged, missing and unlisted files of a results folder, or of one task.

    Files of an unfinished task that are not listed are checked by their own checksums.

    Args:
        whole: Include exported models, and unlisted files of finished tasks that no table is made from.
    """
    while True:
        manifest, found = _read_manifest(root)
        names = [task] if task is not None else sorted({*manifest["tasks"], *_begun_tasks(root)})
        if task is None:
            found += find_changed_files(root, manifest["files"], models=whole)
        for name in names:
            found += _task_problems(root / name, manifest["tasks"].get(name, {"complete": False, "files": {}}), whole)
        if not found or _read_manifest(root)[0] == manifest:  # else a run has replaced files meanwhile
            return found


def _task_problems(folder: Path, entry: Mapping[str, Any], whole: bool) -> Iterator[FileProblem]:
    if entry["files"] and not os.path.lexists(folder):
        yield FileProblem(path=folder, problem=MISSING)
        return
    yield from find_changed_files(folder, entry["files"], models=whole)
    for path in list_files(folder):
        name = _name_in(folder, path)
        if name in entry["files"]:
            continue
        if not entry["complete"]:
            if whole or not name.startswith(OPTIONAL_FILES):  # a report leaves out damaged ones
                yield from _check_content(path)
        elif whole or name.startswith("runs/") or path.suffix in (".json", ".jsonl", COMPRESSED_SUFFIX):
            yield FileProblem(path=path, problem=UNLISTED)


def require_unchanged_results(root: Path) -> None:
    """Raise `UserError` for a link out of a results folder, or a record that is damaged, missing or not listed."""
    require_links_inside(root)
    _raise_first(root, find_problems(root, whole=False))


def require_unchanged_experiment(root: Path, text: str) -> tuple[bool, str]:
    """Raise `UserError` for a link out of a results folder, a damaged manifest or a changed experiment.

    Args:
        text: Experiment that the folder is used for.

    Returns:
        Whether this text is the recorded experiment; and the problem of the manifest or the experiment, if it is one
        that is solved by writing the file again, or "".
    """
    require_links_inside(root)
    manifest, problems = _read_manifest(root)
    content, file = text.encode(), root / EXPERIMENT_FILE
    is_recorded = manifest["files"].get(EXPERIMENT_FILE) == [
        len(content),
        hashlib.blake2b(content, digest_size=16).hexdigest(),
    ]
    problems += find_changed_files(root, manifest["files"])
    solved = [each for each in problems if is_recorded and each.path == file and not file.is_dir()]
    _raise_first(root, [each for each in problems if each not in solved])
    if not problems and file.exists():
        solved += _missing_manifest(root)
    return is_recorded, "".join(each.describe(root) for each in solved)


def _missing_manifest(root: Path) -> list[FileProblem]:
    path = root / MANIFEST_FILE
    return [FileProblem(path=path, problem=MISSING)] if not os.path.lexists(path) and _begun_tasks(root) else []


def _begun_tasks(root: Path) -> set[str]:
    return {path.parent.name for name in ("env.json", "task.json") for path in root.glob(f"*/{name}")}


def require_unchanged_task(folder: Path, say: Callable[[str], None]) -> None:
    """Raise the first problem of the files of a task that a run continues; report missing ones that it makes again.

    Raises:
        FingerprintMismatch: The inputs of the task are unknown, because their record is damaged or missing.
    """
    root, problems = folder.parent, find_problems(folder.parent, folder.name)
    missing = [problem for problem in problems if problem.problem == MISSING]
    for problem in problems:
        if "--accept-changes" in (text := problem.describe(root)):
            raise FingerprintMismatch(text)
    _raise_first(root, [problem for problem in problems if problem not in missing])
    for problem in missing:
        say(problem.describe(root))
    if missing:  # so that it is reported once
        with _updated_manifest(root) as manifest:
            entry = manifest["tasks"][folder.name]
            found = {name: each for name, each in entry["files"].items() if os.path.exists(folder / name)}
            entry |= {"complete": False, "files": found}


def _raise_first(root: Path, problems: list[FileProblem]) -> None:
    if problems:
        more = f"\n{len(problems) - 1} more: qdq verify {root} lists them" if problems[1:] else ""
        raise UserError(f"{problems[0].describe(root)}{more}")


def _task_entry(folder: Path) -> dict[str, Any]:
    entry: dict[str, Any] = (read_manifest(folder.parent) or _EMPTY)["tasks"].get(folder.name, {"files": {}})
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
        manifest = read_manifest(folder) or {**_EMPTY, "tasks": {}}
        yield manifest
        write_json(path, manifest)
    finally:
        os.close(handle)


def _describe_file(path: Path, limit: int | None = None) -> list[Any]:
    """Return the length in bytes and the BLAKE2 digest, of 16 bytes, of a file or of its first `limit` bytes."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    with open_regular(path) as file:
        while block := file.read(2**20 if limit is None else min(2**20, limit - size)):
            digest.update(block)
            size += len(block)
    return [size, digest.hexdigest()]


REPORT_FOLDER = "report"
REPAIRS: Mapping[str, str] = {
    f"{REPORT_FOLDER}/*": "qdq report {folder} makes it again",
    f"*/{MANIFEST_FILE}": "qdq report {folder} makes it again",
    MANIFEST_FILE: "qdq run writes it again, and compares nothing before",
    EXPERIMENT_FILE: "qdq run with this experiment writes it again",
    "experiment*.yaml": "restore a copy; nothing makes it again",
    "*/graph.json": "qdq report {folder} makes it again, if the exported models are there",
    "*/explain/*": "qdq explain {folder} ROW measures it again",
    "*/models/*": "qdq run exports it again",
    "*/patterns.yaml": "qdq run makes it again from the journals",
    "*/task.json": "restore a copy, or repeat the task: qdq run --accept-changes",
    "*/env.json": "restore a copy, or repeat the task: qdq run --accept-changes",
    "*/rows.json": "qdq run makes it again from the journals and final_selection.jsonl.gz",
    "*/runs/*": "qdq run repeats the search, with new readings",
    "*": "qdq run measures it again",
}
"""What makes a file again by a pattern of its path in the results folder; the first match applies."""


def check_results(root: Path) -> tuple[int, bool, list[str]]:
    """Compare every file of a results folder with its manifest, or with its own checksums if it is not listed.

    Returns:
        Number of files that were compared, whether no work remains, and one line for each damaged file with its repair.
    """
    if not any((root / name).is_file() for name in (EXPERIMENT_FILE, MANIFEST_FILE)):
        raise UserError(f"{root}: no results here (no {EXPERIMENT_FILE})")
    require_links_inside(root)
    problems = find_problems(root) + _missing_manifest(root)
    (manifest, _), (report, damaged_report) = _read_manifest(root), _read_manifest(root / REPORT_FOLDER)
    problems += [*damaged_report, *find_changed_files(root / REPORT_FOLDER, report["files"])]
    tables = [manifest["files"], report["files"], *(entry["files"] for entry in manifest["tasks"].values())]
    return sum(map(len, tables)), bool(manifest["complete"]), [problem.describe(root) for problem in problems]


def _read_manifest(folder: Path) -> tuple[dict[str, Any], list[FileProblem]]:
    try:
        return {**_EMPTY, **(read_manifest(folder) or {})}, []
    except UserError as error:
        return dict(_EMPTY), [FileProblem.of_error(folder / MANIFEST_FILE, error)]
