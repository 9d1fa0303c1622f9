"""Model files with the external data that belong to them, copied, moved and told apart as one."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from harness.graph.cleaning.read import external_data

__all__ = ["copy_model", "file_digest", "move_model", "parts"]

_Outside = list[tuple[onnx.TensorProto, Path]]
"""Tensors that lie in other files, each with its file."""


def copy_model(model_path: Path, folder: Path, name: str = "model.onnx") -> Path:
    """Copy a model with its external data, which are called after the copy: a folder may hold several models.

    A model without external data is copied byte for byte. Links would do, but ONNX refuses linked external data.

    Returns:
        The copy; its external data are `<name>.data`, `<name>.data1` and so on beside it.

    Raises:
        UserError: External data are missing, or outside of the model's folder.
    """
    target = folder / name
    content, places = _called_after(target, model_path)
    for other, place in places.items():
        shutil.copyfile(other, place)
    target.write_bytes(content)
    return target


def move_model(model_path: Path, target: Path) -> None:
    """Move a model and its external data, which are called after it, as `copy_model` does.

    The model itself comes last, so that it appears whole or not at all.

    Raises:
        UserError: See `copy_model`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    content, places = _called_after(target, model_path)
    if places:
        model_path.write_bytes(content)
    for other, final in [*places.items(), (model_path, target)]:
        part = final.with_name(f"{final.name}.{os.getpid()}.part")
        shutil.move(other, part)
        os.replace(part, final)


def file_digest(model_path: Path) -> str:
    """SHA-256 of a model's file; where it has external data, of the model and these, whatever their files are called.

    Raises:
        UserError: See `copy_model`.
    """
    content = model_path.read_bytes()
    proto, outside = _outside(content, model_path)
    others = _in_order(outside)
    _rename(outside, {file: str(number) for number, file in enumerate(others)})
    digest = hashlib.sha256(proto.SerializeToString(deterministic=True) if others else content)
    for other in others:
        with other.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def parts(model_path: Path) -> list[Path]:
    """A model's file and, behind it, the files of its external data.

    Raises:
        UserError: See `copy_model`.
    """
    return [model_path, *_in_order(_outside(model_path.read_bytes(), model_path)[1])]


def _outside(content: bytes, model_path: Path) -> tuple[onnx.ModelProto, _Outside]:
    """A model as it is in its file, and what of it lies outside; nothing of a file that has nothing there."""
    proto = onnx.ModelProto()
    if b"location" not in content:  # every reference says so, and few models have any: they need no parsing
        return proto, []
    try:
        proto.ParseFromString(content)
    except DecodeError:  # whoever reads it will say so
        return proto, []
    return proto, external_data(proto, model_path.parent, str(model_path))


def _called_after(target: Path, model_path: Path) -> tuple[bytes, dict[Path, Path]]:
    """What a model's file says where its external data are called after another, and where each of these then goes."""
    content = model_path.read_bytes()
    proto, outside = _outside(content, model_path)
    places = {
        file: target.with_name(f"{target.name}.data{number or ''}") for number, file in enumerate(_in_order(outside))
    }
    if not _rename(outside, {file: place.name for file, place in places.items()}):
        return content, places
    return proto.SerializeToString(deterministic=True), places


def _in_order(outside: _Outside) -> list[Path]:
    """The files of external data by first use: those of a copy are in the same order."""
    return list(dict.fromkeys(file for _, file in outside))


def _rename(outside: _Outside, names: Mapping[Path, str]) -> bool:
    """Give external data other names in their model; whether there was a name to change."""
    entries = [(entry, names[file]) for tensor, file in outside for entry in tensor.external_data]
    changed = [(entry, name) for entry, name in entries if entry.key == "location" and entry.value != name]
    for entry, name in changed:
        entry.value = name
    return bool(changed)
