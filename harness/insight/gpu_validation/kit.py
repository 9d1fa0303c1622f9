"""Run of the validation: each step in a process of its own, its record, and the folder to send back.

    OUT/env.json               machine and installation of the first run
    OUT/steps/NAME/record.json status of a step, with the reason
    OUT/steps/NAME/log.txt     what its program printed
    OUT/steps/NAME/...         its results
    OUT/send/                  copy without models and without names of user and host, with `manifest.json`

A step without a record runs again and continues its earlier work; a skipped step is tried again.
"""

from __future__ import annotations

import csv
import getpass
import gzip
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from harness.base.errors import CandidateError, UserError
from harness.base.files import explain_write_errors, read_json, write_json, write_text
from harness.base.paths import hide_paths
from harness.insight.gpu_validation.steps import CASES_FOLDER, Step, find_missing, list_steps
from harness.measure.provenance import comparability_key, describe_environment
from harness.measure.records import from_json
from harness.results.manifest import MANIFEST_FILE, describe_files, list_files, record_or_check
from harness.results.ownership import exclusive_lock

Status = Literal["passed", "failed", "skipped"]
STEP_LIMIT_S = 6 * 3600.0
ENVIRONMENT_FILE, RECORD_FILE, LOG_FILE = "env.json", "record.json", "log.txt"
SENT_SUFFIXES = frozenset({".json", ".jsonl", ".gz", ".md", ".csv", ".txt", ".yaml"})
REWRITTEN_SUFFIXES = frozenset({".md", ".csv", ".txt"})
"""Files without a checksum, in which private names are replaced; other files that contain one are not sent."""
COMMON_USERS = frozenset({"root", "user", "ubuntu", "runner", "docker"})
MIN_NAME_LENGTH = 4
"""Minimum length of a user name that is replaced; shorter ones occur in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Outcome of a step.

    Attributes:
        status: "skipped": a requirement is missing on this machine.
        reason: Last line that its program printed, or the missing requirement; "" if it passed.
        wall_s: Wall-clock of its last run in seconds, without earlier interrupted runs.
        packages: Versions of the installed packages.
    """

    name: str
    status: Status
    reason: str
    wall_s: float = 0.0
    packages: Mapping[str, Any]


def check_steps(out: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, state and detail of each step without running any.

    The state is "passed" or "failed" by an earlier record in `out`, else "ready" or "missing" (a requirement).
    """
    for step in list_steps():
        record = _read_record(out, step)
        if record is not None and record.status != "skipped":
            yield step.name, record.status, record.reason
        else:
            missing = find_missing(step)
            yield step.name, "missing" if missing else "ready", missing or step.title


def run_validation(out: Path, say: Callable[[str], None], *, retry_failed: bool = False) -> tuple[StepRecord, ...]:
    """Run the steps without a record, and write the folder to send back.

    Args:
        out: Folder of the validation; created where missing.
        say: Receives progress, a line each.
        retry_failed: Run failed steps once more.

    Returns:
        The records of all steps, in their order; a failed step raises no error.

    Raises:
        UserError: The folder was begun on another GPU, is in use, or cannot be written.
    """
    with exclusive_lock(out, "validating this GPU"):
        environment = describe_environment()
        record_or_check(out / ENVIRONMENT_FILE, environment, lambda facts: {"gpus": comparability_key(facts)["gpus"]})
        records = []
        for step in list_steps():
            record = _read_record(out, step)
            if record is None or record.status == "skipped" or (retry_failed and record.status == "failed"):
                record = _run_step(step, out, environment.get("packages", {}), say)
                write_json(_record_path(out, step), asdict(record))
            say(f"{step.name}: {record.status}{f': {record.reason}' if record.reason else ''}")
            records.append(record)
        _write_sent_folder(out, records)
    return tuple(records)


def _record_path(out: Path, step: Step) -> Path:
    return out / "steps" / step.name / RECORD_FILE


def _read_record(out: Path, step: Step) -> StepRecord | None:
    path = _record_path(out, step)
    if not path.exists():
        return None
    try:
        return from_json(StepRecord, read_json(path))
    except ValueError as error:
        raise UserError(f"{path}: {error}; remove it to run the step again") from error


def _run_step(step: Step, out: Path, packages: Mapping[str, Any], say: Callable[[str], None]) -> StepRecord:
    """Run a step in a process of its own, so that a crash of a driver or a library ends this step alone."""
    if missing := find_missing(step):
        return StepRecord(name=step.name, status="skipped", reason=hide_paths(missing), packages=packages)
    say(f"{step.name}: {step.title}; log: {_record_path(out, step).with_name(LOG_FILE)}")
    folder, started_s = (out / "steps" / step.name).resolve(), time.monotonic()
    try:
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if step.experiment is not None:
                write_text(folder / "experiment.yaml", step.experiment())
            status, reason = _run_program(step.program, folder)
        if status == "passed" and step.results and (untimed := _untimed_rows(folder / step.results)):
            status, reason = "failed", f"rows without a latency: {untimed}"
    except (UserError, CandidateError) as error:
        status, reason = "failed", str(error)
    wall_s = time.monotonic() - started_s
    return StepRecord(name=step.name, status=status, reason=_hide_names(reason), wall_s=wall_s, packages=packages)


def _run_program(program: tuple[str, ...], folder: Path) -> tuple[Status, str]:
    """Return the status of a program and the last line that it printed."""
    paths = (Path(__file__).parents[3], CASES_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONUNBUFFERED": "1"}
    with (folder / LOG_FILE).open("a", encoding="utf-8") as log:
        try:
            code = subprocess.run(
                [sys.executable, *program],
                cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=STEP_LIMIT_S, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return "failed", f"ended after {STEP_LIMIT_S / 3600:g} hours"
    printed = [line for line in (folder / LOG_FILE).read_text("utf-8", "replace").splitlines() if line.strip()]
    last = " ".join(printed[-1].split()) if printed else ""
    if code < 0:
        return "failed", f"ended by signal {-code}; last line: {last}"
    return ("failed" if code else "passed"), last if code else ""


def _untimed_rows(results: Path) -> str:
    """Return the rows of a results folder that have no latency, with their reasons; a run passes with some of them."""
    with (results / "report" / "main.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if not row["latency_ms"]]
    return "; ".join(f"{row['method']} ({row['precision']}): {row['reason']}" for row in rows)


def _write_sent_folder(out: Path, records: list[StepRecord]) -> None:
    """Write `send` anew: text results of all steps, and a manifest with digests of the files and the records."""
    target, left_out = out / "send", []
    shutil.rmtree(target, ignore_errors=True)
    for path in (out / ENVIRONMENT_FILE, *list_files(out / "steps")):
        name = path.relative_to(out)
        if path.suffix in SENT_SUFFIXES and not {"work", "models", MANIFEST_FILE}.intersection(name.parts):
            left_out += [] if _copy_without_names(path, target / name) else [name.as_posix()]
    manifest = {"records": [asdict(record) for record in records], "left_out": left_out}
    write_json(target / MANIFEST_FILE, {**manifest, "files": describe_files(target, list_files(target))})


def _copy_without_names(source: Path, target: Path) -> bool:
    """Copy a text file without private names; return False if it has some and a checksum protects its text."""
    content = source.read_bytes()
    text = (gzip.decompress(content) if source.suffix == ".gz" else content).decode("utf-8", "replace")
    hidden = _hide_names(text)
    if hidden != text and source.suffix not in REWRITTEN_SUFFIXES:
        return False
    if hidden != text:
        write_text(target, hidden)
        return True
    with explain_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return True


def _hide_names(text: str) -> str:
    """Return a text with marks instead of folders, the host's and the user's name."""
    hidden = hide_paths(text)
    with suppress(KeyError, OSError):  # users of containers may have no name
        user = getpass.getuser()
        if len(user) >= MIN_NAME_LENGTH and user not in COMMON_USERS:
            hidden = re.sub(rf"\b{re.escape(user)}\b", "<user>", hidden)
    return hidden
