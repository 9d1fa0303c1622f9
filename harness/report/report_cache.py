"""Check that a report matches its results, by a digest of its inputs stored next to the page."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from harness.report.load.graph_store import GRAPH_FILE
from harness.results_dir.io import write_text

__all__ = ["INPUTS_DIGEST_FILE", "compute_inputs_digest", "is_up_to_date", "write_inputs_digest"]

INPUTS_DIGEST_FILE = "inputs.sha256"
TASK_FOLDER_FILES = ("cell.json", "env.json", "stopped.txt")
"""A folder with one of these is a cell's."""
RECORD_GLOBS = ("*", "runs/*", "explain/*")
RECORD_SUFFIXES = frozenset({".json", ".jsonl", ".txt", ".yaml"})
CODE_SUFFIXES = frozenset({".css", ".j2", ".js", ".py"})
REPORT_LIBRARIES = ("jinja2", "matplotlib", "numpy", "pandas", "scipy")
"""Whose other versions may write another report from the same records."""


def is_up_to_date(folder: Path) -> bool:
    """Whether `folder/report` was written by this code from what now lies in the results folder."""
    out = folder / "report"
    try:
        return (out / "index.html").exists() and (out / INPUTS_DIGEST_FILE).read_text(
            encoding="utf-8"
        ).strip() == compute_inputs_digest(folder)
    except (OSError, UnicodeDecodeError):
        return False


def write_inputs_digest(folder: Path, digest: str) -> None:
    """Note what the report was made of; to be called when it is whole.

    Args:
        digest: Taken before anything was read: what a run wrote since then is not in the report.

    Raises:
        UserError: It cannot be written.
    """
    write_text(folder / "report" / INPUTS_DIGEST_FILE, f"{digest}\n")


def compute_inputs_digest(folder: Path) -> str:
    """Of records and code by their content, of exported models by their names: rows.json has their digests."""
    whole = hashlib.sha256(f"{folder}\n".encode())  # which the page names
    for name in REPORT_LIBRARIES:
        whole.update(f"{name} {version(name)}\n".encode())
    code = Path(__file__).parents[1]
    for root, path in (
        *((code, path) for path in _code_files(code)),
        *((folder, path) for path in _record_files(folder)),
    ):
        whole.update(f"{path.relative_to(root)} {_content_digest(path)}\n".encode())
    for path in sorted(path for cell in _task_folders(folder) for path in cell.glob("models/*.onnx")):
        whole.update(f"{path.relative_to(folder)}\n".encode())
    return whole.hexdigest()


def _content_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:  # a run that goes on took it away
        return "gone"


def _code_files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.suffix in CODE_SUFFIXES)


def _record_files(folder: Path) -> Iterator[Path]:
    """What a run wrote, and `qdq explain`; the kept graph is made from that and the models, by the report itself."""
    found = {
        path
        for cell in _task_folders(folder)
        for pattern in RECORD_GLOBS
        for path in cell.glob(pattern)
        if path.name != GRAPH_FILE
    }
    return (
        path
        for path in sorted({folder / "experiment.yaml", *found})
        if path.suffix in RECORD_SUFFIXES and path.is_file()
    )


def _task_folders(folder: Path) -> set[Path]:
    return {path.parent for name in TASK_FOLDER_FILES for path in folder.glob(f"*/{name}")}
