"""ONNX graph of a forest of decision trees over the choices of placements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper


def write_forest(forest: Any, dimensions: int, interval: float, props: Mapping[str, str], path: Path) -> None:
    """Write a forest that predicts log latencies as an ONNX file, with operators of `ai.onnx.ml` 3.

    The file has the input `choices` (integers, [placements, dimensions]) and the outputs `latency_ms`, `low_ms` and
    `high_ms`, each of shape [placements, 1].

    Args:
        forest: Fitted forest of scikit-learn; its features are the choices and the number of those that are not 0.
        dimensions: Number of choices of a placement.
        interval: Factor of at least 1 between the predicted latency and either end of its interval.
        props: Metadata of the file, by key.
        path: File to write; an existing file is replaced.
    """
    attributes = _tree_attributes(forest)
    factor = helper.make_tensor("interval", TensorProto.FLOAT, [1], [interval])
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    zero = helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0])
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["choices"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("Greater", ["floats", "zero"], ["is_quantized"]),
            helper.make_node("Cast", ["is_quantized"], ["quantized"], to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["quantized", "axes"], ["count"]),
            helper.make_node("Concat", ["floats", "count"], ["features"], axis=1),
            helper.make_node(
                "TreeEnsembleRegressor", ["features"], ["log_ms"], domain="ai.onnx.ml", n_targets=1, **attributes
            ),
            helper.make_node("Exp", ["log_ms"], ["latency_ms"]),
            helper.make_node("Div", ["latency_ms", "interval"], ["low_ms"]),
            helper.make_node("Mul", ["latency_ms", "interval"], ["high_ms"]),
        ],
        "surrogate",
        [helper.make_tensor_value_info("choices", TensorProto.INT64, ["placements", dimensions])],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["placements", 1])
            for name in ("latency_ms", "low_ms", "high_ms")
        ],
        [factor, axes, zero],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    helper.set_model_props(model, dict(props))
    onnx.save(model, path)


def _tree_attributes(forest: Any) -> dict[str, list[Any]]:
    """Return the attributes of `TreeEnsembleRegressor` that describe nodes and leaves."""
    attributes: dict[str, list[Any]] = defaultdict(list)
    for number, fitted in enumerate(forest.estimators_):
        tree = fitted.tree_
        leaf, every = tree.children_left < 0, np.arange(tree.node_count)
        parts = {
            "nodes_treeids": np.full(tree.node_count, number),
            "nodes_nodeids": every,
            "nodes_featureids": np.where(leaf, 0, tree.feature),
            "nodes_modes": np.where(leaf, "LEAF", "BRANCH_LEQ"),
            "nodes_values": np.where(leaf, 0.0, tree.threshold),
            "nodes_truenodeids": np.where(leaf, 0, tree.children_left),
            "nodes_falsenodeids": np.where(leaf, 0, tree.children_right),
            "target_treeids": np.full(leaf.sum(), number),
            "target_nodeids": every[leaf],
            "target_ids": np.zeros(leaf.sum(), int),
            "target_weights": tree.value[leaf, 0, 0] / len(forest.estimators_),
        }
        for name, values in parts.items():
            attributes[name] += values.tolist()
    return attributes
