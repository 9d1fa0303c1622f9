"""Run the tests that need an NVIDIA GPU, and write a folder with their results to send back.

    python experiments/scripts/validate_gpu.py out/gpu [--retry-failed]

The tests are those of `pytest -m gpu`. Each function and each class of tests is a step, which runs in a process of its
own, so that a crash of a driver ends this step alone.

    OUT/env.json               machine and installation of the first run
    OUT/doctor.txt             runtimes, devices and versions, by `qdq doctor`
    OUT/steps/NAME/record.json status of a step, with the reason
    OUT/steps/NAME/report.xml  its tests, with figures and messages
    OUT/steps/NAME/log.txt     the output of pytest
    OUT/steps/NAME/...         results that a repeated step continues
    OUT/send/                  copy without models and without names of user and host, with `manifest.json`

The same command continues after an interruption, or after the installation of missing software: passed and failed steps
are not repeated, skipped steps are tried again. The exit status is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import getpass
import gzip
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from harness.base.files import read_json, write_json, write_text
from harness.base.paths import hide_paths
from harness.measure.provenance import comparability_key, describe_environment
from harness.results.manifest import MANIFEST_FILE, describe_files, list_files, record_or_check
from harness.results.ownership import exclusive_lock

ROOT = Path(__file__).parents[2]
STEP_LIMIT_S = 6 * 3600.0
RESULTS_VARIABLE = "QDQ_GPU_RESULTS"
"""Environment variable with the folder in which tests keep results that a repeated step continues."""
SENT_SUFFIXES = frozenset({".json", ".jsonl", ".gz", ".md", ".csv", ".txt", ".yaml", ".xml"})
REWRITTEN_SUFFIXES = frozenset({".md", ".csv", ".txt", ".xml"})
"""Files without a checksum, in which private names are replaced; other files that contain one are not sent."""
COMMON_USERS = frozenset({"root", "user", "ubuntu", "runner", "docker"})
MIN_NAME_LENGTH = 4
"""Minimum length of a user name that is replaced; shorter ones occur in words."""


def validate(out: Path, *, retry_failed: bool = False) -> list[dict[str, Any]]:
    """Run the steps without a record, write the folder to send back, and return the records of all steps.

    Args:
        out: Folder of the results; created if missing.
        retry_failed: Whether failed steps run once more.

    Raises:
        UserError: The folder belongs to another GPU, is in use, or cannot be written.
    """
    with exclusive_lock(out, "validating this GPU"):
        environment = describe_environment()
        record_or_check(out / "env.json", environment, lambda facts: {"gpus": comparability_key(facts)["gpus"]})
        with (out / "doctor.txt").open("w", encoding="utf-8") as file:
            subprocess.run([sys.executable, "-m", "harness.cli.main", "doctor"], stdout=file, check=False)
        records = []
        for name, tests_of_step in list_steps().items():
            file = out / "steps" / name / "record.json"
            record = read_json(file) if file.exists() else {"status": "skipped"}
            if record["status"] == "skipped" or (retry_failed and record["status"] == "failed"):
                record = {"name": name, **run_step(file.parent, tests_of_step)}
                write_json(file, {**record, "packages": environment.get("packages", {})})
            print(f"{name}: {record['status']}{record['reason'] and ': '}{record['reason']}", flush=True)
            records.append(record)
        write_sent_folder(out, records)
    return records


def list_steps() -> Mapping[str, Sequence[str]]:
    """Return pytest's arguments for each step by its name, in the order in which pytest runs the tests."""
    found = run_pytest(["tests", "--collect-only", "-q"], subprocess.PIPE)
    steps: dict[str, list[str]] = {}
    for test in re.findall(r"^\S+\.py::[^\s\[]+", found.stdout, re.MULTILINE):
        file, first, *_ = test.split("::")
        steps[f"{Path(file).stem.removeprefix('test_')}-{first.removeprefix('test_')}"] = [f"{file}::{first}"]
    return steps


def run_pytest(arguments: Sequence[str], output: Any, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the tests for a GPU in a child process, with the output of pytest in a file or a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", *arguments],
        cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True, check=False, **more,
    )  # fmt: skip


def run_step(folder: Path, tests: Sequence[str]) -> dict[str, Any]:
    """Run the tests of a step, and return its status with the reason and the seconds that it took."""
    folder.mkdir(parents=True, exist_ok=True)
    report, start_s, crash = folder.resolve() / "report.xml", time.monotonic(), ""
    report.unlink(missing_ok=True)
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        try:
            environment = {**os.environ, RESULTS_VARIABLE: str(folder.resolve()), "PYTHONUNBUFFERED": "1"}
            code = run_pytest([*tests, f"--junitxml={report}"], log, env=environment, timeout=STEP_LIMIT_S).returncode
            crash = f"ended by signal {-code}" if code < 0 else f"pytest ended with status {code}"
        except subprocess.TimeoutExpired:
            crash = f"ended after {STEP_LIMIT_S / 3600:g} hours"
    status, reason = read_report(report) if report.exists() else ("failed", crash)
    return {"status": status, "reason": hide_names(reason), "wall_s": time.monotonic() - start_s}


def read_report(report: Path) -> tuple[str, str]:
    """Return the status of the tests in a report, and the message of the first test that failed or was skipped."""
    tests = ElementTree.parse(report).getroot().findall(".//testcase")
    for status, tags in (("failed", ("failure", "error")), ("skipped", ("skipped",))):
        found = [each for test in tests for tag in tags for each in test.findall(tag)]
        if found and (status == "failed" or len(found) == len(tests)):
            return status, " ".join(found[0].get("message", "").split())
    return "passed", ""


def write_sent_folder(out: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write `send` anew: text results of all steps, and a manifest with digests of the files and the records."""
    target, left_out = out / "send", []
    shutil.rmtree(target, ignore_errors=True)
    for path in (out / "env.json", out / "doctor.txt", *list_files(out / "steps")):
        name = path.relative_to(out)
        if path.suffix in SENT_SUFFIXES and not {"models", MANIFEST_FILE}.intersection(name.parts):
            left_out += [] if copy_without_names(path, target / name) else [name.as_posix()]
    manifest = {"records": list(records), "left_out": left_out}
    write_json(target / MANIFEST_FILE, {**manifest, "files": describe_files(target, list_files(target))})


def copy_without_names(source: Path, target: Path) -> bool:
    """Copy a text file without private names; return False if it has some and a checksum protects its text."""
    content = source.read_bytes()
    text = (gzip.decompress(content) if source.suffix == ".gz" else content).decode("utf-8", "replace")
    hidden = hide_names(text)
    if hidden != text and source.suffix not in REWRITTEN_SUFFIXES:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    if hidden == text:
        target.write_bytes(content)
    else:
        write_text(target, hidden)
    return True


def hide_names(text: str) -> str:
    """Return a text with marks instead of folders, the host's and the user's name."""
    hidden = hide_paths(text)
    with suppress(KeyError, OSError):  # users of containers may have no name
        user = getpass.getuser()
        if len(user) >= MIN_NAME_LENGTH and user not in COMMON_USERS:
            hidden = re.sub(rf"\b{re.escape(user)}\b", "<user>", hidden)
    return hidden


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--retry-failed", action="store_true", help="run failed steps once more")
    options = parser.parse_args()
    counts = Counter(each["status"] for each in validate(options.out, retry_failed=options.retry_failed))
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    print(f"Send back the folder {options.out / 'send'}: texts without models and names; its manifest lists the files")
    sys.exit(bool(counts["failed"]))
