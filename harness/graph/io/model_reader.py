"""Reading of untrusted model files, with checks of sizes, functions and external data."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PureWindowsPath

import onnx
import psutil
from google.protobuf.message import DecodeError, EncodeError
from onnx import numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor

from harness.base.errors import UserError
from harness.graph.protos import encoded_size_bytes, iter_graphs, iter_nodes, raw_size_bytes

ExternalTensors = list[tuple[onnx.TensorProto, Path]]
"""Tensors in other files, each with its file."""
MAX_INLINED_NODES = 100_000
MAX_ENCODED_BYTES = 2**31 - 1  # of a protobuf message
_LIMIT = (
    "more than 2 GiB, which protobuf, the format of ONNX, cannot encode: export the model with its weights in the main "
    "graph (of an If, export one branch), or with smaller tensors"
)
_LFS_POINTER_PREFIX = b"version https://git-lfs"


@contextmanager
def refuse_damage(source: object) -> Iterator[None]:
    """Turn any exception of the body, which a damaged model may cause, into a `UserError` that names the model."""
    try:
        yield
    except UserError:
        raise
    except EncodeError as error:
        raise UserError(f"{source}: a part of it has {_LIMIT}") from error
    except Exception as error:  # the checks do not find all damages
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(
            f"{source}: cannot be processed ({text}); the file may be damaged or use an unsupported construct: export "
            "it again, or report this model"
        ) from error


def require_encodable(proto: onnx.ModelProto, source: str) -> None:
    """Raise `UserError` if subgraphs, functions and attributes are too large for protobuf.

    Weights and Constant nodes of the main graph do not count, because these are kept apart from the model.
    """
    constants = (node for node in proto.graph.node if node.op_type == "Constant")
    main = [*proto.graph.initializer, *(attribute.t for node in constants for attribute in node.attribute)]
    if sum(map(encoded_size_bytes, _iter_tensors(proto))) - sum(map(encoded_size_bytes, main)) > MAX_ENCODED_BYTES:
        names = {tensor.name for tensor in main} - {""}  # tensors of attributes have no names as a rule
        inner = (tensor for tensor in _iter_tensors(proto) if tensor.name not in names)
        largest = max(inner, key=encoded_size_bytes, default=onnx.TensorProto())
        size = encoded_size_bytes(largest) / 1e9
        where = f"its subgraphs, functions and attributes (largest tensor: {largest.name!r}, {size:.1f} GB)"
        raise UserError(f"{source}: {where} have {_LIMIT}")


def read_model(path: Path, source: str) -> tuple[onnx.ModelProto, str]:
    """Return the model in a file with all its weights, and the SHA-256 (hexadecimal) of the file and its external data.

    Args:
        source: Name of the model in messages.
    """
    with refuse_damage(source):
        raw, proto = _read_bytes(path, source), onnx.ModelProto()
        truncated = UserError(
            f"{source}: a truncated or damaged ONNX file ({len(raw)} bytes); compare its size with the original "
            "and fetch or export the model again"
        )
        not_onnx = UserError(
            f"{source}: not an ONNX file (it starts with {raw[:12]!r}); export the model to ONNX first, "
            "for instance with torch.onnx.export"
        )
        try:
            proto.ParseFromString(raw)
        except DecodeError as error:
            # Field 1 (ir_version, a small number) comes first in every file that a known exporter writes.
            raise truncated if len(raw) > 1 and raw[0] == 0x08 and 0 < raw[1] < 0x20 else not_onnx from error
        if not (proto.ir_version and proto.HasField("graph") and proto.opset_import):
            is_onnx = proto.ir_version and (proto.HasField("graph") or proto.opset_import)
            raise truncated if is_onnx or proto.producer_name else not_onnx
        check_functions(proto, source)
        digest = hashlib.sha256(raw)
        external = load_external_data(proto, path.parent, source)
        for file in sorted(distinct_files(external)):
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        for tensor, _ in external:
            try:
                load_external_data_for_tensor(tensor, str(path.parent))
            except (ValueError, OSError, onnx.checker.ValidationError) as error:
                raise UserError(
                    f"{source}: the external data of {tensor.name!r} is truncated or damaged ({error}); "
                    "fetch or export model and data again, together"
                ) from error
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
        for tensor in _iter_tensors(proto):
            _check_size(tensor, source)
        return proto, digest.hexdigest()


def check_functions(proto: onnx.ModelProto, source: str) -> None:
    """Check that functions can be inlined, because native code (onnx 1.21) inlines them without a limit."""
    bodies: dict[tuple[str, str, str], list[onnx.NodeProto]] = {}
    for function in proto.functions:
        bodies.setdefault(_function_key(function.domain, function.name, function.overload), []).extend(function.node)
    calls = {key: Counter(_iter_calls(nodes, bodies)) for key, nodes in bodies.items()}
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        names = " -> ".join(name for _, name, _ in error.args[1])
        raise UserError(f"{source}: a function calls itself ({names}), which ONNX forbids; export it again") from error
    costs: dict[tuple[str, str, str], int] = {}
    for key in order:
        parts = iter_graphs(onnx.FunctionProto(node=bodies[key]))
        # A large node counts once per 4 KiB, because inlining copies its constants.
        own = sum(max(1, node.ByteSize() >> 12) for part in parts for node in part.node)
        costs[key] = own + sum(count * costs[each] for each, count in calls[key].items())
    total = sum(costs[key] for key in _iter_calls(proto.graph.node, bodies))
    if total > MAX_INLINED_NODES:
        raise UserError(
            f"{source}: its functions stand for {total:.3g} nodes, and at most {MAX_INLINED_NODES:,} are inlined; "
            "export the model again, without functions"
        )


def _function_key(domain: str, name: str, overload: str) -> tuple[str, str, str]:
    return "" if domain == "ai.onnx" else domain, name, overload


def _iter_calls(nodes: Iterable[onnx.NodeProto], bodies: Container[object]) -> Iterator[tuple[str, str, str]]:
    """Yield the functions that nodes and their subgraphs call, once per call."""
    for part in iter_graphs(onnx.FunctionProto(node=nodes)) if bodies else ():
        for node in part.node:
            key = _function_key(node.domain, node.op_type, node.overload)
            if key in bodies:
                yield key


def load_external_data(proto: onnx.ModelProto, folder: Path, source: str) -> list[tuple[onnx.TensorProto, Path]]:
    """Return the tensors of a model with values in other files, each with that file; values are not read.

    Args:
        folder: Folder of the model.
        source: Name of the model in messages.
    """
    files: dict[str, Path] = {}
    external: ExternalTensors = []
    total_bytes = 0
    for tensor in _iter_tensors(proto):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        file = folder / location
        absolute = Path(location).is_absolute() or bool(PureWindowsPath(location).drive)
        if location not in files and (not location or absolute or not file.resolve().is_relative_to(folder.resolve())):
            raise UserError(
                f"{source}: the weights {tensor.name!r} refer to the file {location!r} outside of the model's folder, "
                "which is refused; save the model again with its data in the same folder "
                "(onnx.save(model, path, save_as_external_data=True))"
            )
        if location not in files and not file.is_file():
            raise UserError(
                f"{source}: the external data {location!r} with the weights {tensor.name!r} is missing; "
                f"put that file into {folder}"
            )
        external.append((tensor, files.setdefault(location, file)))
        with suppress(ValueError):  # onnx reports invalid numbers later
            total_bytes += int(entries.get("length") or file.stat().st_size - int(entries.get("offset") or 0))
    total_bytes = max(total_bytes, sum(file.stat().st_size for file in distinct_files(external)))
    if external and total_bytes > psutil.virtual_memory().total:
        raise UserError(
            f"{source}: its external data have {total_bytes / 1e9:,.0f} GB, more than the "
            f"{psutil.virtual_memory().total / 1e9:,.0f} GB of memory of this machine; export the model again, or use "
            "a machine with more memory"
        )
    return external


def _read_bytes(path: Path, source: str) -> bytes:
    try:
        if path.is_dir():
            raise UserError(f"{source}: this is a folder; name the .onnx file in it")
        if path.exists() and not path.is_file():
            raise UserError(f"{source}: this is no file, but a pipe or a device")
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{source}: no such file ({path})") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: cannot be read: {getattr(error, 'strerror', error)}") from error
    if not raw:
        raise UserError(f"{source}: the file is empty; fetch or export the model again")
    if raw.startswith(_LFS_POINTER_PREFIX):
        raise UserError(f"{source}: this is a Git LFS pointer, not the model; run 'git lfs pull' in its repository")
    return raw


def _iter_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers and tensor attributes of all graphs and functions, and the parts of sparse ones."""
    sparse: list[onnx.SparseTensorProto] = []
    for body in (proto.graph, *proto.functions):
        for part in iter_graphs(body):
            if isinstance(part, onnx.GraphProto):
                yield from part.initializer
                sparse += part.sparse_initializer
    for attribute in (attribute for node in iter_nodes(proto) for attribute in node.attribute):
        if attribute.HasField("t"):
            yield attribute.t
        if attribute.HasField("sparse_tensor"):
            sparse.append(attribute.sparse_tensor)
        yield from attribute.tensors
        sparse += attribute.sparse_tensors
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def _check_size(tensor: onnx.TensorProto, source: str) -> None:
    """Check that a tensor's values fill its shape exactly (onnx.proto, TensorProto.raw_data)."""
    needed, problem = raw_size_bytes(tensor), ""
    if tensor.HasField("raw_data") and needed is not None:
        found = len(tensor.raw_data)
        problem = f"has {found} bytes, but needs {needed}" if needed != found else ""
    else:
        try:
            numpy_helper.to_array(tensor)
        except (KeyError, TypeError, ValueError) as error:
            problem = f"and type {tensor.data_type} cannot be read ({error})"
    if problem:
        raise UserError(
            f"{source}: the tensor {tensor.name!r} of shape {list(tensor.dims)} {problem}; the file is damaged, fetch "
            "or export the model again"
        )


def distinct_files(external: ExternalTensors) -> list[Path]:
    """Return the files of external tensors, each once, in their order."""
    return list(dict.fromkeys(file for _, file in external))


def read_external_tensors(content: bytes, model_path: Path) -> tuple[onnx.ModelProto, ExternalTensors]:
    """Return a serialized model without its external data, and its external tensors; none if it cannot be parsed."""
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError:  # reported when the model is read
        return proto, []
    with refuse_damage(model_path):
        return proto, load_external_data(proto, model_path.parent, str(model_path))


def rename_external_files(external: ExternalTensors, names: Mapping[Path, str]) -> bool:
    """Change the names of external data in their tensors, in place; return whether any name changed.

    Args:
        names: New name of each data file, which itself is not renamed.
    """
    entries = [(entry, names[file]) for tensor, file in external for entry in tensor.external_data]
    changed = [(entry, name) for entry, name in entries if entry.key == "location" and entry.value != name]
    for entry, name in changed:
        entry.value = name
    return bool(changed)
