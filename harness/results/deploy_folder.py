"""Find, read and check a folder with one model to deploy; `harness.ship.bundle` writes it."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.base.errors import UserError
from harness.base.files import file_sha256, read_json, read_text

SHIP_FOLDER = "ship"
FACTS_FILE, MANIFEST_FILE, REPORT_FILE, SCRIPT_FILE = "ship.json", "SHA256SUMS", "report.md", "deploy.py"


class StoredFacts(BaseModel):
    """Keys of `ship.json` that commands use (`harness.ship.results_bundle`); it may come from a stranger."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    schema_version: Literal[1] = Field(alias="schema")
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.onnx$", max_length=200)]
    answer: str
    latency_ms: Annotated[list[float], Field(min_length=3, max_length=3)]
    speedup: Annotated[list[float], Field(min_length=3, max_length=3)]
    runtime: dict[str, Any]
    experiment: dict[str, Any]
    shapes: dict[str, dict[str, Any]] = {}
    dynamic_file: str | None = None


def find_bundle(path: Path) -> Path:
    """Return the folder to deploy at a path: itself, that of a file in it, or the only one in a results folder."""
    near = path.parent if path.is_file() else path
    if is_bundle(near):
        return near
    parent = near if near.name == SHIP_FOLDER else near / SHIP_FOLDER
    folders = sorted(each.parent for each in parent.glob(f"*/{FACTS_FILE}"))
    if len(folders) == 1:
        return folders[0]
    if folders:
        raise UserError(f"{path}: has several folders to deploy; name one: {', '.join(map(str, folders))}")
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    raise UserError(f"{path}: no folder to deploy (RESULTS/{SHIP_FOLDER}/NAME); a run writes one if a model is faster")


def read_bundle(folder: Path) -> dict[str, Any]:
    """Return the facts of a bundle."""
    for problem in check_bundle(folder):
        raise UserError(f"{problem}; qdq run writes the folder again")
    return _read_facts(folder)


def check_bundle(folder: Path) -> Iterator[str]:
    """Yield a message for each difference between a bundle and the exact set of files that the manifest lists.

    Python imports any module, package or link next to `deploy.py`, so each entry that is not listed is a problem.
    """
    try:
        yield from _differences(folder)
    except UserError as error:
        yield str(error)
    except OSError as error:
        yield f"{error.filename or folder}: cannot be read ({error.strerror or error})"


def _differences(folder: Path) -> Iterator[str]:
    manifest = folder / MANIFEST_FILE
    if manifest.is_symlink():
        raise UserError(f"{manifest}: no manifest of a folder to deploy (a link)")
    text = read_text(manifest, "a manifest of a folder to deploy")
    lines = re.findall(r"([0-9a-f]{64})  ([A-Za-z0-9][A-Za-z0-9._-]*)\n", text)
    whole = sum(len(digest) + len(name) + 3 for digest, name in lines) == len(text)
    if not whole or len({name.lower() for _, name in lines}) < len(lines):
        problem = "a line is damaged, or two lines have the same name"
        raise UserError(f"{manifest}: no manifest of a folder to deploy ({problem})")
    recorded = {name: digest for digest, name in lines}
    entries = {entry.name: entry for entry in sorted(folder.iterdir())}
    for name in sorted(entries.keys() - recorded.keys() - {MANIFEST_FILE}):
        yield f"{folder / name}: not in {MANIFEST_FILE}, and Python may import it instead of a package: move it away"
    damaged = False
    for name, digest in recorded.items():
        problem = ""
        if name not in entries:
            problem = "missing"
        elif not stat.S_ISREG(entries[name].lstat().st_mode):
            problem = "a link, a folder or a pipe, but each entry of a folder to deploy is a regular file"
        elif file_sha256(entries[name]) != digest:
            problem = f"damaged: the content differs from {MANIFEST_FILE}"
        if problem:
            yield f"{folder / name}: {problem}"
        damaged |= bool(problem)
    if not damaged and FACTS_FILE not in recorded:
        yield f"{manifest}: lists no {FACTS_FILE}"
    elif not damaged:
        facts = _read_facts(folder)
        needed = {FACTS_FILE, SCRIPT_FILE, REPORT_FILE, *filter(None, (facts["file"], facts.get("dynamic_file")))}
        for name in sorted(needed - recorded.keys()):
            yield f"{manifest}: lists no {name}, which a folder with this {FACTS_FILE} has"
        for name in sorted(recorded):
            if not is_bundle_file(name, facts["file"].removesuffix(".onnx")):
                yield f"{manifest}: lists {name}, which is no file of a folder to deploy"


def is_bundle_file(name: str, bundle: str) -> bool:
    """Return whether a bundle of a name may have a file of this name."""
    models = rf"{re.escape(bundle)}(\.dynamic)?\.onnx(\.data\d*)?"
    return name in (FACTS_FILE, MANIFEST_FILE, REPORT_FILE, SCRIPT_FILE) or re.fullmatch(models, name) is not None


def _read_facts(folder: Path) -> dict[str, Any]:
    return read_json(folder / FACTS_FILE, schema=StoredFacts)


def is_bundle(path: Path) -> bool:
    """Return whether a folder is one to deploy, complete or damaged."""
    return any((path / name).is_file() for name in (FACTS_FILE, MANIFEST_FILE))


def holds_bundle(path: Path) -> bool:
    """Return whether a path is a folder to deploy, or a folder of results with some."""
    return (path / FACTS_FILE).is_file() or path.name == SHIP_FOLDER or (path / SHIP_FOLDER).is_dir()


def bundle_model(path: Path) -> Path:
    """Return the model of the folder to deploy at a path, see `find_bundle`; a file is returned as it is."""
    if path.is_dir():
        folder = find_bundle(path)
        return folder / str(read_bundle(folder)["file"])
    if path.is_file() and (path.parent / FACTS_FILE).is_file():
        read_bundle(path.parent)
    return path
