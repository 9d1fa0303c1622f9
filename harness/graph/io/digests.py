"""SHA-256 of model files. ONNX is imported only for models with external data, so that reports do not need it."""

from __future__ import annotations

import hashlib
from pathlib import Path

IR_SUFFIX = ".xml"
"""Of an OpenVINO IR, whose weights are in a `.bin` file of the same name."""
_READ_CHUNK_BYTES = 1 << 24


def digest_file(model_path: Path) -> str:
    """Return the SHA-256 (hexadecimal) of a model file and its external data, independent of the data files' names.

    Raises:
        OSError: A file cannot be read.
    """
    content, files = model_path.read_bytes(), ir_weights(model_path)
    if may_have_external_data(content, model_path):
        from harness.graph.io.model_reader import distinct_files, read_external_tensors, rename_external_files

        proto, external = read_external_tensors(content, model_path)
        files = distinct_files(external)
        rename_external_files(external, {file: str(number) for number, file in enumerate(files)})
        content = proto.SerializeToString(deterministic=True) if files else content
    digest = hashlib.sha256(content)
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(_READ_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def may_have_external_data(content: bytes, model_path: Path) -> bool:
    """Return whether a model file may refer to external data: it has the word "location", and is no OpenVINO IR."""
    return model_path.suffix != IR_SUFFIX and b"location" in content


def ir_weights(model_path: Path) -> list[Path]:
    """Return the `.bin` file with the weights of an OpenVINO IR as a list; empty for an ONNX file."""
    return [model_path.with_suffix(".bin")] if model_path.suffix == IR_SUFFIX else []
