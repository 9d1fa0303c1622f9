"""Check that a report matches its results, by a digest of its inputs stored next to the page."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from harness.report.load.graph_store import GRAPH_FILE
from harness.results_dir.io import write_text

__all__ = ["FILE", "digest_of", "is_current", "keep_digest"]

FILE = "inputs.sha256"
MARKS = ("cell.json", "env.json", "stopped.txt")
"""A folder with one of these is a cell's."""
RECORDS = ("*", "runs/*", "explain/*")
KINDS = frozenset({".json", ".jsonl", ".txt", ".yaml"})
CODE = frozenset({".css", ".j2", ".js", ".py"})
LIBRARIES = ("jinja2", "matplotlib", "numpy", "pandas", "scipy")
"""Whose other versions may write another report from the same records."""


def is_current(folder: Path) -> bool:
    """Whether `folder/report` was written by this code from what now lies in the results folder."""
    out = folder / "report"
    try:
        return (out / "index.html").exists() and (out / FILE).read_text(encoding="utf-8").strip() == digest_of(folder)
    except (OSError, UnicodeDecodeError):
        return False


def keep_digest(folder: Path, digest: str) -> None:
    """Note what the report was made of; to be called when it is whole.

    Args:
        digest: Taken before anything was read: what a run wrote since then is not in the report.

    Raises:
        UserError: It cannot be written.
    """
    write_text(folder / "report" / FILE, f"{digest}\n")


def digest_of(folder: Path) -> str:
    """Of records and code by their content, of exported models by their names: rows.json has their digests."""
    whole = hashlib.sha256(f"{folder}\n".encode())  # which the page names
    for name in LIBRARIES:
        whole.update(f"{name} {version(name)}\n".encode())
    code = Path(__file__).parents[1]
    for root, path in (*((code, path) for path in _code(code)), *((folder, path) for path in _records(folder))):
        whole.update(f"{path.relative_to(root)} {_content(path)}\n".encode())
    for path in sorted(path for cell in _cells(folder) for path in cell.glob("models/*.onnx")):
        whole.update(f"{path.relative_to(folder)}\n".encode())
    return whole.hexdigest()


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:  # a run that goes on took it away
        return "gone"


def _code(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.suffix in CODE)


def _records(folder: Path) -> Iterator[Path]:
    """What a run wrote, and `qdq explain`; the kept graph is made from that and the models, by the report itself."""
    found = {
        path for cell in _cells(folder) for pattern in RECORDS for path in cell.glob(pattern) if path.name != GRAPH_FILE
    }
    return (path for path in sorted({folder / "experiment.yaml", *found}) if path.suffix in KINDS and path.is_file())


def _cells(folder: Path) -> set[Path]:
    return {path.parent for name in MARKS for path in folder.glob(f"*/{name}")}
