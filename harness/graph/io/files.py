"""Model files with their external data: copied, moved and hashed as one."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from harness.graph.io.reader import load_external_data

__all__ = ["copy_model", "digest_file", "model_files", "move_model"]

_READ_CHUNK_BYTES = 1 << 24

_ExternalTensors = list[tuple[onnx.TensorProto, Path]]
"""Tensors in other files, each with its file."""


def copy_model(model_path: Path, folder: Path, name: str = "model.onnx") -> Path:
    """Copy a model with its external data, which are named after the copy: a folder may hold several models.

    A model without external data is copied byte for byte. Links are no alternative: ONNX refuses linked external data.

    Returns:
        The copy; its external data are `<name>.data`, `<name>.data1` and so on.
    """
    target = folder / name
    content, destinations = _renamed_after(target, model_path)
    for file, destination in destinations.items():
        shutil.copyfile(file, destination)
    target.write_bytes(content)
    return target


def move_model(model_path: Path, target: Path) -> None:
    """Move a model with its external data, named as by `copy_model`; it appears complete or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    content, destinations = _renamed_after(target, model_path)
    if destinations:
        model_path.write_bytes(content)
    for file, destination in [*destinations.items(), (model_path, target)]:
        part = destination.with_name(f"{destination.name}.{os.getpid()}.part")
        shutil.move(file, part)
        os.replace(part, destination)


def digest_file(model_path: Path) -> str:
    """Return the SHA-256 of a model's file and its external data, independent of the names of the latter."""
    content = model_path.read_bytes()
    proto, external = _external_tensors(content, model_path)
    files = _distinct_files(external)
    _rename_files(external, {file: str(number) for number, file in enumerate(files)})
    digest = hashlib.sha256(proto.SerializeToString(deterministic=True) if files else content)
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(_READ_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def model_files(model_path: Path) -> list[Path]:
    """Return a model's file, followed by the files of its external data."""
    return [model_path, *_distinct_files(_external_tensors(model_path.read_bytes(), model_path)[1])]


def _external_tensors(content: bytes, model_path: Path) -> tuple[onnx.ModelProto, _ExternalTensors]:
    """Return a model as it is in its file, and its external tensors; an empty model if it has none."""
    proto = onnx.ModelProto()
    if b"location" not in content:  # part of every reference, so most models need not be parsed
        return proto, []
    try:
        proto.ParseFromString(content)
    except DecodeError:  # reported when the model is read
        return proto, []
    return proto, load_external_data(proto, model_path.parent, str(model_path))


def _renamed_after(target: Path, model_path: Path) -> tuple[bytes, dict[Path, Path]]:
    """Return a model's bytes with external data named after `target`, and the destination of each of these files."""
    content = model_path.read_bytes()
    proto, external = _external_tensors(content, model_path)
    destinations = {
        file: target.with_name(f"{target.name}.data{number or ''}")
        for number, file in enumerate(_distinct_files(external))
    }
    if not _rename_files(external, {file: destination.name for file, destination in destinations.items()}):
        return content, destinations
    return proto.SerializeToString(deterministic=True), destinations


def _distinct_files(external: _ExternalTensors) -> list[Path]:
    """Return the files of external data by first use, an order that copies keep."""
    return list(dict.fromkeys(file for _, file in external))


def _rename_files(external: _ExternalTensors, names: Mapping[Path, str]) -> bool:
    """Change the names of external data in their model; return whether any name changed."""
    entries = [(entry, names[file]) for tensor, file in external for entry in tensor.external_data]
    changed = [(entry, name) for entry, name in entries if entry.key == "location" and entry.value != name]
    for entry, name in changed:
        entry.value = name
    return bool(changed)
