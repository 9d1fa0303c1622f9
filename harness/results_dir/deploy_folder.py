"""Find, read and check a folder with one model to deploy; `harness.shipping.bundle` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import UserError
from harness.records import first_problem
from harness.results_dir.io import file_sha256, read_json

SHIP_FOLDER = "ship"
FACTS_FILE, MANIFEST_FILE = "ship.json", "SHA256SUMS"
MAX_MANIFEST_BYTES = 100_000
CODE_SUFFIXES = (".py", ".pyc", ".so", ".pyd")
"""Suffixes of files that `deploy.py` could import instead of an installed package."""


class StoredFacts(BaseModel):
    """Keys of `ship.json` that commands use (`harness.shipping.bundle.shipment_facts`); it may come from a stranger."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    schema_version: Literal[1] = Field(alias="schema")
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.onnx$", max_length=200)]
    answer: str
    latency_ms: Annotated[list[float], Field(min_length=3, max_length=3)]
    runtime: dict[str, Any]
    experiment: dict[str, Any]
    shapes: dict[str, dict[str, Any]] = {}


def find_bundle(path: Path) -> Path:
    """Return the folder to deploy at a path: itself, the folder of a file in it, or the only one in a results folder.

    Raises:
        UserError: There is none, or there are several.
    """
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
    """Return the facts of a bundle.

    Raises:
        UserError: It is no bundle, or a file in it differs from the manifest.
    """
    for problem in check_bundle(folder):
        raise UserError(f"{problem}; qdq run writes the folder again")
    facts = read_json(folder / FACTS_FILE)
    try:
        StoredFacts.model_validate(facts)
    except ValidationError as error:
        problem = first_problem(error)
        raise UserError(f"{folder / FACTS_FILE}: {problem}; qdq run writes the folder again") from error
    if facts["file"] not in _recorded_digests(folder):  # the model would not be checked
        raise UserError(f"{folder / FACTS_FILE}: {MANIFEST_FILE} lists no {facts['file']}; qdq run writes it again")
    return facts


def check_bundle(folder: Path) -> Iterator[str]:
    """Yield a message for each file of a bundle that is missing or differs from the manifest.

    Code that the manifest does not list, and a damaged manifest, are reported, too.
    """
    path = folder / MANIFEST_FILE
    try:
        recorded = _recorded_digests(folder)
    except UserError as error:
        yield str(error)
        return
    for name, digest in recorded.items():
        file = folder / name
        if Path(name).name != name:
            yield f"{path}: {name!r} is no file of this folder"
        elif not file.is_file():
            yield f"{file}: missing"
        elif file_sha256(file) != digest:
            yield f"{file}: damaged: the content differs from {MANIFEST_FILE}"
    if FACTS_FILE not in recorded:
        yield f"{path}: lists no {FACTS_FILE}"
    for file in sorted(folder.iterdir()):
        if file.suffix in CODE_SUFFIXES and file.name not in recorded:
            yield f"{file}: not in {MANIFEST_FILE}, and deploy.py may import it: remove it"


def _recorded_digests(folder: Path) -> dict[str, str]:
    path = folder / MANIFEST_FILE
    try:
        if not path.is_file() or path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError(f"no regular file of at most {MAX_MANIFEST_BYTES} bytes")
        *lines, rest = path.read_bytes().decode().split("\n")
        if rest:
            raise ValueError("its last line is damaged")
        return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no manifest of a folder to deploy ({error})") from error


def is_bundle(path: Path) -> bool:
    """Return whether a folder is one to deploy, complete or damaged."""
    return any((path / name).is_file() for name in (FACTS_FILE, MANIFEST_FILE))


def holds_bundle(path: Path) -> bool:
    """Return whether a path is a folder to deploy, or a folder of results with some."""
    return (path / FACTS_FILE).is_file() or path.name == SHIP_FOLDER or (path / SHIP_FOLDER).is_dir()


def bundle_model(path: Path) -> Path:
    """Return the model of the folder to deploy at a path, see `find_bundle`.

    Raises:
        UserError: There is none, there are several, or a file differs from the manifest.
    """
    folder = find_bundle(path)
    return folder / str(read_bundle(folder)["file"])
