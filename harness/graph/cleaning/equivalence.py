"""Check after loading that the prepared model computes what the file computes.

Both are run once on random inputs, unless preparation left all nodes and constants as they were. What cannot be run is
reported; a model that computes something else is refused.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import onnx
import psutil

from harness.errors import UserError
from harness.graph.cleaning.clean import constant_value
from harness.graph.cleaning.compare import Verdict, compare_runs
from harness.graph.cleaning.guard import Fallen, sturdy
from harness.graph.cleaning.versions import Comparison
from harness.graph.cleaning.write import is_large, write
from harness.graph.model import Model

__all__ = ["Original", "check_equivalent"]

logger = logging.getLogger(__name__)

KEPT_VERDICTS = 256
"""Verdicts that one process remembers."""
_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
MEMORY_SHARE = 0.8
"""Part of the free memory that the comparison may take."""


@dataclass(frozen=True, slots=True)
class Original:
    """A model before it is prepared.

    Attributes:
        source: The file, or the model in memory.
        key: Identifies the file and the arguments of the preparation; "" for a model in memory.
        nodes: Of the main graph, without names and documentation.
        constants: Initializers and Constant nodes by name.
        samples: Declared first size of each input.
        opsets: By domain.
    """

    source: Path | onnx.ModelProto
    key: str
    nodes: frozenset[bytes]
    constants: dict[str, onnx.TensorProto]
    samples: dict[str, int]
    opsets: dict[str, int]

    @classmethod
    def of(cls, proto: onnx.ModelProto, source: Path | onnx.ModelProto, key: str = "") -> Original:
        """Describe `proto`, which may be changed afterwards, and which was read from `source`."""
        constants = {tensor.name: tensor for tensor in proto.graph.initializer}
        for node in proto.graph.node:
            if node.op_type == "Constant" and (value := constant_value(node)) is not None:
                constants[node.output[0]] = value
        return cls(
            source=source,
            key=key,
            nodes=frozenset(map(_bare, proto.graph.node)),
            constants=constants,
            samples={v.name: v.type.tensor_type.shape.dim[0].dim_value for v in proto.graph.input
                     if v.type.tensor_type.shape.dim},
            opsets=_opsets(proto),
        )  # fmt: skip


def check_equivalent(original: Original, model: Model) -> bool:
    """Compare a prepared model with its original; the verdict is remembered for the life of this process.

    Returns:
        False if they could not be compared, which is logged.

    Raises:
        UserError: They do not compute the same.
    """
    if _is_untouched(original, model.proto):
        return True
    before, key = original.source, original.key
    if isinstance(before, onnx.ModelProto) and not is_large(before):
        before = before.SerializeToString()
        digest = hashlib.sha256(before)
        digest.update(model.proto.SerializeToString(deterministic=True))
        key = digest.hexdigest()
    verdicts = _verdicts(os.getpid())
    verdict = verdicts.get(key) if key else None
    if verdict is None:
        verdict = _compared(original, before, model)
        if verdict.unchecked:
            logger.warning("%s: not compared with the results of the original: %s", model.source, verdict.unchecked)
        if key:
            verdicts[key] = verdict
        while len(verdicts) > KEPT_VERDICTS:
            verdicts.popitem(last=False)
    if verdict.change:
        old, new = original.opsets.get("", 0), _opsets(model.proto).get("", 0)
        remedy = f"export it with opset {new} or later" if old < new else "please report the model as a fault of qdq"
        raise UserError(
            f"{model.source}: preparing the model would change what it computes: {verdict.change}; {remedy}"
        )
    return not verdict.unchecked


def _compared(original: Original, before: onnx.ModelProto | Path | bytes, model: Model) -> Verdict:
    """Run the comparison in the helper process; models of more than 1.9 GB go there through files."""
    types = {name: model.types[name] for name in model.inputs if name in model.types}
    untyped = [name for name in model.inputs if name not in types]
    if untyped:
        return Verdict(unchecked=f"input {untyped[0]!r} is no tensor of a known shape")
    widened = {n: t.shape[0] for n, t in types.items() if t.shape and original.samples.get(n) == 1 != t.shape[0]}
    with tempfile.TemporaryDirectory(prefix="qdq-") as folder:
        if isinstance(before, onnx.ModelProto):
            before = write(before, Path(folder, "original.onnx"))
        large = is_large(model.proto)
        comparison = Comparison(
            original=before,
            prepared=write(model.proto, Path(folder, "prepared.onnx")) if large else model.proto.SerializeToString(),
            inputs={name: (kind.dtype, kind.shape) for name, kind in types.items()},
            widened=frozenset(widened),
            samples=max(widened.values(), default=1),
        )
        return _in_helper(comparison, model.source)


def _in_helper(comparison: Comparison, source: str) -> Verdict:
    """Run the comparison in the helper process, a second time with integers of 1 if it crashes (division by 0)."""
    memory_gb = psutil.virtual_memory().available * MEMORY_SHARE / 1e9
    what = f"{source}: the comparison"
    try:
        return sturdy(what, compare_runs, comparison, memory_gb=memory_gb)
    except Fallen as error:
        if error.crashed and comparison.draws != (2,):
            return _in_helper(replace(comparison, draws=(2,)), source)
        return Verdict(unchecked=f"ONNX Runtime {error.how}")
    except _ERRORS as error:  # a fault of the comparison must not refuse a valid model
        return Verdict(unchecked=f"{type(error).__name__}: {error}")


def _is_untouched(original: Original, proto: onnx.ModelProto) -> bool:
    """Return whether all nodes and constants of a prepared model are those of the original."""
    opsets = _opsets(proto)
    if any(original.opsets.get(domain, version) != version for domain, version in opsets.items()):
        return False
    if not all(_bare(node) in original.nodes for node in proto.graph.node):
        return False
    return all(original.constants.get(tensor.name) == tensor for tensor in proto.graph.initializer)


def _bare(node: onnx.NodeProto) -> bytes:
    """Return what a node computes and under which tensor names."""
    bare = onnx.NodeProto(op_type=node.op_type, input=node.input, output=node.output)
    bare.domain = "" if node.domain == "ai.onnx" else node.domain
    bare.attribute.extend(sorted(node.attribute, key=lambda attribute: str(attribute.name)))
    return bytes(bare.SerializeToString(deterministic=True))


def _opsets(proto: onnx.ModelProto) -> dict[str, int]:
    return {"" if o.domain == "ai.onnx" else o.domain: o.version for o in proto.opset_import}


@lru_cache(maxsize=1)
def _verdicts(_process: int) -> OrderedDict[str, Verdict]:
    """Return the verdicts of this process by key."""
    return OrderedDict()
