"""Model files with their external data: write, copy, move and hash them together."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

import onnx

from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.graph.io.digests import ir_weights, may_have_external_data
from harness.graph.io.model_reader import ExternalTensors, distinct_files, read_external_tensors, rename_external_files
from harness.graph.protos import copy_message, encoded_size_bytes, iter_graphs

MAX_SINGLE_FILE_BYTES = 1_900_000_000  # of weights; protobuf itself ends at 2 GiB


def is_large(proto: onnx.ModelProto) -> bool:
    """Return whether a model has more than 1.9 GB of weights, and so is too large for one file."""
    tensors = (tensor for graph in iter_graphs(proto.graph) for tensor in graph.initializer)
    return sum(map(encoded_size_bytes, tensors)) > MAX_SINGLE_FILE_BYTES


def write_model(proto: onnx.ModelProto, path: Path) -> Path:
    """Write a model to one file or, above 1.9 GB, to the file and `<name>.data`; equal models give equal bytes.

    Folders are created, existing files are replaced, and `path` is returned.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_large(proto):
        path.write_bytes(proto.SerializeToString(deterministic=True))
        return path
    data = path.with_name(f"{path.name}.data")
    data.unlink(missing_ok=True)
    data.touch()  # readable as the umask says; onnx appends to it, and would create it for its owner only
    onnx.save_model(copy_message(proto), path, save_as_external_data=True, location=data.name)
    return path


def to_proto(model: object) -> onnx.ModelProto:
    """Return an ONNX or onnx-graphsurgeon model as an ONNX model; raise `TypeError` for other objects."""
    if isinstance(model, onnx.ModelProto):
        return model
    graphsurgeon = sys.modules.get("onnx_graphsurgeon")  # imported if the model is a graph of it
    if graphsurgeon is not None and isinstance(model, graphsurgeon.Graph):
        return graphsurgeon.export_onnx(model)
    raise TypeError(f"a model is an onnx.ModelProto or an onnx_graphsurgeon.Graph, but got {type(model).__name__}")


def serialize_model(proto: onnx.ModelProto) -> bytes:
    """Return a model as bytes; raise `UserError` above 2 GB, the limit of protobuf."""
    try:
        content: bytes = proto.SerializeToString(deterministic=True)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"a model above 2 GB does not fit into one piece of memory: give a file ({error})") from error
    return content


def digest_model(proto: onnx.ModelProto) -> str:
    """Return the SHA-256 of a serialized model in hexadecimal, without its external data."""
    return hashlib.sha256(serialize_model(proto)).hexdigest()


def copy_model(model_path: Path, folder: Path, name: str = "model.onnx") -> Path:
    """Copy a model with its external data into a folder, which may have other models.

    A model without external data is copied byte for byte. No links are made, because ONNX refuses linked external data.

    Returns:
        Path of the copy; its external data are `<name>.data`, `<name>.data1` and so on. Files of these names are
        replaced.
    """
    target = folder / name
    content, destinations = _renamed_after(target, model_path)
    for file, destination in destinations.items():
        shutil.copyfile(file, destination)
    target.write_bytes(content)
    return target


def move_model(model_path: Path, target: Path) -> None:
    """Move a model with its external data, which get the names of `copy_model`; the model file is moved last.

    Existing files are replaced, and the folder of `target` is created.
    """
    with explain_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        content, destinations = _renamed_after(target, model_path)
        if destinations:
            model_path.write_bytes(content)
        for file, destination in [*destinations.items(), (model_path, target)]:
            part = destination.with_name(f"{destination.name}.{os.getpid()}.part")
            part.touch()
            mode = part.stat().st_mode  # by the umask; tools create files for their owner only
            shutil.move(file, part)
            part.chmod(mode)
            os.replace(part, destination)


def set_model_aside(model_path: Path, target: Path) -> Path:
    """Move a model that is unfit for use to NAME.wrong.onnx instead of `target`, remove `target`, and return the path.

    `target` may be the model itself, or an older one, which would pass for the result.
    """
    aside = target.with_name(f"{target.stem}.wrong{target.suffix}")
    move_model(model_path, aside)
    for path in (target, target.with_name(f"{target.name}.data")):
        path.unlink(missing_ok=True)
    return aside


def model_files(model_path: Path) -> list[Path]:
    """Return a model's file, followed by the files of its external data or of an OpenVINO IR's weights."""
    return [
        model_path,
        *ir_weights(model_path),
        *distinct_files(_external_tensors(model_path.read_bytes(), model_path)[1]),
    ]


def _external_tensors(content: bytes, model_path: Path) -> tuple[onnx.ModelProto, ExternalTensors]:
    """Return the result of `read_external_tensors`; a model without external data is not parsed."""
    found = may_have_external_data(content, model_path)
    return read_external_tensors(content, model_path) if found else (onnx.ModelProto(), [])


def _renamed_after(target: Path, model_path: Path) -> tuple[bytes, dict[Path, Path]]:
    """Return a model's bytes with external data named after `target`, and the destination of each of these files."""
    content = model_path.read_bytes()
    if weights := ir_weights(model_path):
        return content, {file: target.with_suffix(file.suffix) for file in weights}
    proto, external = _external_tensors(content, model_path)
    destinations = {
        file: target.with_name(f"{target.name}.data{number or ''}")
        for number, file in enumerate(distinct_files(external))
    }
    if not rename_external_files(external, {file: destination.name for file, destination in destinations.items()}):
        return content, destinations
    return proto.SerializeToString(deterministic=True), destinations
