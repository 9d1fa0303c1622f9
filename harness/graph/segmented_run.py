"""Execution of a model in segments, between which values of all batches can be read and changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from harness.graph.protos import copy_message, tensors_read
from harness.graph.qdq.qdq_graph import unique_node_names
from harness.measure.provenance import count_cores
from harness.plugins.api import Array, name_arrays
from harness.workers.inference import MAX_CONCURRENCY, ConcurrentInfer, infer_all

Feeds = Mapping[str, Array]


def open_reference_session(model: str | bytes) -> Any:
    """Return a session of ONNX Runtime without graph optimizations on one thread.

    Its results depend neither on fusions nor on the number of cores. It runs on the CPU.

    Args:
        model: File of the model, or the model in bytes.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _run_all(proto: onnx.ModelProto | Path, batches: Sequence[Feeds]) -> Iterator[Feeds]:
    """Yield the outputs of a reference session for each batch; several batches are computed at the same time."""
    session = open_reference_session(str(proto) if isinstance(proto, Path) else proto.SerializeToString())
    names = [value.name for value in session.get_outputs()]

    def infer(feeds: Feeds) -> Feeds:
        return dict(zip(names, session.run(None, dict(feeds)), strict=True))

    yield from infer_all(ConcurrentInfer(infer, infer, min(count_cores(), MAX_CONCURRENCY)), batches)


def iter_outputs(path: Path, batches: Sequence[Feeds]) -> list[dict[str, Array]]:
    """Return the arrays in the outputs of a model file by name, for each batch; call it in the helper process."""
    return [name_arrays(dict(outputs)) for outputs in _run_all(path, batches)]


def sum_outputs(path: Path, batches: Sequence[Feeds]) -> dict[str, float]:
    """Return the sum of each output over the batches, by name; call it in the helper process.

    The model must have only scalar outputs.
    """
    found: dict[str, float] = defaultdict(float)
    for outputs in _run_all(path, batches):
        for name, value in outputs.items():
            found[name] += float(value)
    return dict(found)


def channel_maxima(path: Path, tensors: Sequence[str], batches: Sequence[Feeds]) -> dict[str, Array]:
    """Return the largest magnitude by channel over all batches, by tensor; call it in the helper process.

    Args:
        tensors: Names of the tensors, with channels along the last axis.
    """
    proto = onnx.load(path)
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors)
    found: dict[str, Array] = {}
    for outputs in _run_all(proto, batches):
        for name in tensors:
            values = np.abs(outputs[name]).reshape(-1, outputs[name].shape[-1]).max(axis=0)
            found[name] = np.maximum(found.get(name, values), values)
    return found


class SegmentedRun:
    """Execution of a model file in steps, in the order of its nodes.

    Attributes:
        values: For each tensor that later nodes read: its value for each batch.
    """

    def __init__(self, path: Path, batches: Sequence[Feeds]) -> None:
        self._proto = onnx.load(path)
        graph = self._proto.graph
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._producer = {name: index for index, node in enumerate(graph.node) for name in node.output}
        self._outputs = dict(zip(unique_node_names(graph), (node.output[0] for node in graph.node), strict=True))
        self._last_use = {name: index for index, node in enumerate(graph.node) for name in tensors_read(node)}
        self._position = 0
        self.values: dict[str, list[Array]] = {}
        for value in graph.input:
            if value.name not in self._constants:
                self.values[value.name] = [np.asarray(feeds[value.name]) for feeds in batches]

    @property
    def names(self) -> tuple[str, ...]:
        """Unique names of the nodes in order, see `unique_node_names`."""
        return tuple(self._outputs)

    def run_to(self, node: str) -> str:
        """Run all nodes up to and including `node`; return the name of its first output, which is then in `values`."""
        target: str = self._outputs[node]
        self._run(self._producer[target] + 1, target)
        return target

    def run_before(self, node: str) -> None:
        """Run all nodes before `node`, so that `values` has its inputs."""
        self._run(self._producer[self._outputs[node]], "")

    def skip(self, node: str, results: Sequence[Array]) -> None:
        """Set the results of `node` for each batch instead of running it; call `run_before` first."""
        target = self._outputs[node]
        self._position = self._producer[target] + 1
        self._drop_unread()
        self.values[target] = list(results)

    def _drop_unread(self) -> None:
        self.values = {
            name: each for name, each in self.values.items() if self._last_use.get(name, -1) >= self._position
        }

    def _run(self, stop: int, target: str) -> None:
        nodes = self._proto.graph.node[self._position : stop]
        made = [name for each in nodes for name in each.output if name]
        kept = [name for name in made if name == target or self._last_use.get(name, -1) >= stop]
        read = dict.fromkeys(name for each in nodes for name in tensors_read(each))
        if kept:
            given = {name: self.values[name] for name in read if name in self.values}
            inputs = [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(arrays[0].dtype), arrays[0].shape)
                for name, arrays in given.items()
            ]
            outputs = [onnx.ValueInfoProto(name=name) for name in kept]
            constants = [self._constants[name] for name in read if name in self._constants]
            graph = helper.make_graph([copy_message(node) for node in nodes], "segment", inputs, outputs, constants)
            segment = helper.make_model(graph, opset_imports=self._proto.opset_import)
            segment.ir_version = self._proto.ir_version
            count = len(next(iter(self.values.values())))
            feeds = [{name: arrays[i] for name, arrays in given.items()} for i in range(count)]
            results = list(_run_all(segment, feeds))
        self._position = stop
        self._drop_unread()
        self.values |= {name: [result[name] for result in results] for name in kept}


def layer_sqnr_db(
    float_path: Path, quantized_path: Path, layers: Sequence[str], batches: Sequence[Feeds]
) -> dict[str, float]:
    """Return the SQNR in dB of each layer's result, mean over the batches, by node; call it in the helper process.

    Args:
        float_path: Float model.
        quantized_path: Q/DQ model with the same names of nodes.
        layers: Names of nodes.
        batches: Inputs; the activations of all batches must fit into memory.
    """
    runs = SegmentedRun(float_path, batches), SegmentedRun(quantized_path, batches)
    found: dict[str, float] = {}
    for name in (name for name in runs[1].names if name in set(layers)):
        reference, quantized = (run.values[target] for run in runs for target in [run.run_to(name)])
        pairs = [(f.astype(np.float64), q.astype(np.float64)) for f, q in zip(reference, quantized, strict=True)]
        ratios = [np.square(f).sum() / max(np.square(q - f).sum(), np.finfo(float).tiny) for f, q in pairs]
        found[name] = float(np.mean(10 * np.log10(np.maximum(ratios, np.finfo(float).tiny))))
    return found


def measure_layer_shifts(
    float_path: Path, quantized_path: Path, layers: Mapping[str, int], batches: Sequence[Feeds], sequential: bool
) -> dict[str, Array]:
    """Return the mean error (quantized minus float) by channel of each layer's result; call it in the helper process.

    Args:
        float_path: Float model.
        quantized_path: Q/DQ model with the same names of nodes.
        layers: Axis of the channels of each layer's result, by the name of its node.
        batches: Inputs; the activations of all batches must fit into memory.
        sequential: Whether each layer reads quantized results without the mean errors of earlier layers; otherwise it
            reads results of the float model, with its Q/DQ pairs.
    """
    runs = SegmentedRun(float_path, batches), SegmentedRun(quantized_path, batches)
    order = [name for name in runs[1].names if name in layers]
    found: dict[str, Array] = {}
    for name in order:
        targets = [run.run_to(name) for run in runs]
        reference, quantized = (run.values[target] for run, target in zip(runs, targets, strict=True))
        axis = layers[name] % reference[0].ndim
        others = tuple(i for i in range(reference[0].ndim) if i != axis)
        means = [np.mean([each.mean(others, np.float64) for each in run], axis=0) for run in (quantized, reference)]
        found[name] = means[0] - means[1]
        shift = np.expand_dims(found[name], others).astype(quantized[0].dtype)
        for i, values in enumerate(quantized):
            if sequential:
                values -= shift  # in place: new arrays of this size cost much of the time
            else:
                quantized[i] = reference[i]
    return found
