"""Check that a prepared model computes what its file computes.

Both are run once on random inputs, unless preparation left all nodes and constants unchanged. A comparison that cannot
be run is reported; a model with other results is refused.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import onnx

from harness.base.errors import UserError
from harness.graph.equivalence.compare import ComparisonTask, EquivalenceVerdict, compare_runs
from harness.graph.io.files import is_large, write_model
from harness.graph.model import Model, TensorType
from harness.graph.passes.static_shapes import static_types
from harness.graph.protos import constants_by_name
from harness.workers.helper_process import HelperCallFailed, call_in_helper_process

logger = logging.getLogger(__name__)

MAX_CACHED_VERDICTS = 256
_COMPARISON_ERRORS = (
    ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def check_interface(
    before: onnx.GraphProto, after: onnx.GraphProto, known: Mapping[str, TensorType], source: str
) -> None:
    """Raise `UserError` if names of inputs and outputs, or types of inputs, differ between two graphs.

    Args:
        known: Types of outputs before the preparation, as far as known; these are compared too.
        source: Name of the model in messages.
    """
    old, new = static_types(before), static_types(after)
    made = {value.name for value in after.input}
    pairs = [(v.name, old.get(v.name), new.get(v.name) if v.name in made else None) for v in before.input]
    outputs = [value.name for value in before.output]
    pairs += [(name, known[name], new[name]) for name in outputs if name in known and name in new]
    changed = next((pair for pair in pairs if pair[1] != pair[2]), None)
    same_names = [v.name for v in before.input] == [v.name for v in after.input]
    if changed is None and same_names and outputs == [value.name for value in after.output]:
        return
    what = "its inputs and outputs" if changed is None else f"{changed[0]!r} from {changed[1]} to {changed[2]}"
    raise UserError(f"{source}: preparing the model would change {what}; export it with a newer opset")


@dataclass(frozen=True, slots=True)
class OriginalModel:
    """Model before its preparation.

    Attributes:
        source: The file, or the model in memory.
        key: Text that identifies the file and the arguments of the preparation; "" for a model in memory.
        nodes: Serialized nodes of the main graph other than Constant, without names and documentation.
        constants: Initializers and Constant nodes by name.
        samples: Declared size of the first dimension of each input; 0 for a dynamic one. Scalar inputs are absent.
        opsets: Version of the operator set by domain.
    """

    source: Path | onnx.ModelProto
    key: str
    nodes: frozenset[bytes]
    constants: dict[str, onnx.TensorProto]
    samples: dict[str, int]
    opsets: dict[str, int]

    @classmethod
    def of(cls, proto: onnx.ModelProto, source: Path | onnx.ModelProto, key: str = "") -> OriginalModel:
        """Return the description of a model from `source`, with the key `key`; `proto` may be changed afterwards."""
        shapes = {value.name: value.type.tensor_type.shape.dim for value in proto.graph.input}
        return cls(
            source=source,
            key=key,
            nodes=frozenset(_serialize_node(node) for node in proto.graph.node if node.op_type != "Constant"),
            constants=constants_by_name(proto.graph),
            samples={name: dims[0].dim_value for name, dims in shapes.items() if dims},
            opsets=_opset_versions(proto),
        )


def check_equivalent(original: OriginalModel, model: Model) -> bool:
    """Raise `UserError` if a prepared model and its original compute different results; cache the verdict.

    Returns:
        False if they could not be compared, which is logged; else True.
    """
    opsets, graph = _opset_versions(model.proto), model.proto.graph
    if (
        all(original.opsets.get(domain, version) == version for domain, version in opsets.items())
        and all(_serialize_node(node) in original.nodes for node in graph.node)
        and all(original.constants.get(tensor.name) == tensor for tensor in graph.initializer)
    ):
        return True
    before, key = original.source, original.key
    if isinstance(before, onnx.ModelProto) and not is_large(before):
        before = before.SerializeToString()
        digest = hashlib.sha256(before)
        digest.update(model.proto.SerializeToString(deterministic=True))
        key = digest.hexdigest()
    verdicts = _verdict_cache(os.getpid())
    verdict = verdicts.get(key) if key else None
    if verdict is None:
        verdict = _compare_versions(original, before, model)
        if verdict.unchecked:
            logger.warning("%s: not compared with the results of the original: %s", model.source, verdict.unchecked)
        if key:
            verdicts[key] = verdict
        while len(verdicts) > MAX_CACHED_VERDICTS:
            verdicts.popitem(last=False)
    if verdict.change:
        old, new = original.opsets.get("", 0), opsets.get("", 0)
        remedy = f"export it with opset {new} or later" if old < new else "please report the model as a fault of qdq"
        raise UserError(
            f"{model.source}: preparing the model would change what it computes: {verdict.change}; {remedy}"
        )
    return not verdict.unchecked


def _compare_versions(
    original: OriginalModel, before: onnx.ModelProto | Path | bytes, model: Model
) -> EquivalenceVerdict:
    """Compare two versions in the helper process; models of more than 1.9 GB are passed to it as files."""
    types = {name: model.types[name] for name in model.inputs if name in model.types}
    untyped = [name for name in model.inputs if name not in types]
    if untyped:
        return EquivalenceVerdict(unchecked=f"input {untyped[0]!r} is no tensor of a known shape")
    widened = {n: t.shape[0] for n, t in types.items() if t.shape and original.samples.get(n) == 1 != t.shape[0]}
    with tempfile.TemporaryDirectory(prefix="qdq-") as folder:
        if isinstance(before, onnx.ModelProto):
            before = write_model(before, Path(folder, "original.onnx"))
        large = is_large(model.proto)
        task = ComparisonTask(
            original=before,
            prepared=write_model(model.proto, Path(folder, "it.onnx")) if large else model.proto.SerializeToString(),
            inputs={name: (kind.dtype, kind.shape) for name, kind in types.items()},
            widened=frozenset(widened),
            samples=max(widened.values(), default=1),
        )
        what = f"{model.source}: the comparison"
        try:
            try:
                return call_in_helper_process(what, compare_runs, task)
            except HelperCallFailed as error:
                if not error.crashed:
                    raise
                # It may have crashed by a division by 0, which integer inputs of 1 avoid.
                return call_in_helper_process(what, compare_runs, replace(task, draws=(2,)))
        except HelperCallFailed as error:
            return EquivalenceVerdict(unchecked=f"ONNX Runtime {error.how}")
        except _COMPARISON_ERRORS as error:  # an error of the comparison is no reason to refuse a valid model
            return EquivalenceVerdict(unchecked=f"{type(error).__name__}: {error}")


def _serialize_node(node: onnx.NodeProto) -> bytes:
    """Return an operator with its attributes and the names of its tensors, without its own name."""
    bare = onnx.NodeProto(op_type=node.op_type, input=node.input, output=node.output)
    bare.domain = "" if node.domain == "ai.onnx" else node.domain
    bare.attribute.extend(sorted(node.attribute, key=lambda attribute: str(attribute.name)))
    return bytes(bare.SerializeToString(deterministic=True))


def _opset_versions(proto: onnx.ModelProto) -> dict[str, int]:
    return {"" if o.domain == "ai.onnx" else o.domain: o.version for o in proto.opset_import}


@lru_cache(maxsize=1)
def _verdict_cache(_process: int) -> OrderedDict[str, EquivalenceVerdict]:
    return OrderedDict()
