"""Model files with the external data that belong to them, copied, moved and told apart as one."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

__all__ = ["copy_model", "file_digest", "move_model", "parts"]


def copy_model(model_path: Path, folder: Path, name: str = "model.onnx") -> Path:
    """Copy a model with its external data.

    External data are the files whose names stand in the model; one that only happens to be named there costs a copy.
    Links would do, but ONNX refuses linked external data.

    Returns:
        The copy.
    """
    content = model_path.read_bytes()
    target = folder / name
    for other in _named(content, model_path):
        shutil.copyfile(other, folder / other.name)
    target.write_bytes(content)
    return target


def move_model(model_path: Path, target: Path) -> None:
    """Move a model and the data beside it; the model itself comes last, so that it appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for other in [*_named(model_path.read_bytes(), model_path), model_path]:
        final = target if other == model_path else target.with_name(other.name)
        part = final.with_name(f"{final.name}.{os.getpid()}.part")
        shutil.move(other, part)
        os.replace(part, final)


def file_digest(model_path: Path) -> str:
    """SHA-256 of a model's file, followed by its external data where it has some."""
    content = model_path.read_bytes()
    digest = hashlib.sha256(content)
    for other in _named(content, model_path):
        with other.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def parts(model_path: Path) -> list[Path]:
    """A model's file and, behind it, the files of its external data."""
    return [model_path, *_named(model_path.read_bytes(), model_path)]


def _named(content: bytes, model_path: Path) -> list[Path]:
    if b"location" not in content:
        return []
    others = (other for other in sorted(model_path.parent.iterdir()) if other != model_path)
    return [other for other in others if other.name.encode() in content and other.is_file()]
