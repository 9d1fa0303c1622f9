"""`Inserter.pairs` counts the pairs that `count_pairs` finds in the file that it writes."""

import numpy as np
import pytest
from onnx_models import everywhere, loaded

from harness.graph.builder import GraphBuilder
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import count_pairs, diff_edges
from harness.graph.rules.dialects import ONNXRUNTIME


def two_convolutions() -> tuple[Model, int]:
    """Two convolutions share a weight; each widens its first channel, which is all but dead, for its own bias."""
    weight = np.random.default_rng(0).standard_normal((4, 4, 1, 1)).astype(np.float32)
    weight[0] *= 1e-7
    g = GraphBuilder("convolutions")
    inputs = [g.input(name, (1, 4, 4, 4)) for name in ("a", "c")]
    constants = g.const(weight), g.const(np.full(4, 10, np.float32))
    g.output(g.op("Add", *(g.op("Conv", x, *constants) for x in inputs)))
    return loaded(g), 6


def one_table_of_words() -> tuple[Model, int]:
    """An embedding and a product read one constant at scales of their own."""
    g = GraphBuilder("words")
    table = g.const(np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32))
    x = g.op("Add", g.op("Gather", table, g.input("ids", (1, 4), "int64")), g.input("x", (1, 4, 8)))
    g.output(g.op("MatMul", x, table))
    return loaded(g), 5


def names_of_other_tools() -> tuple[Model, int]:
    """A float model has tensors named like those that ONNX Runtime's quantization tools insert."""
    g = GraphBuilder("names")
    x = g.input("x", (2, 4, 4))
    (y,) = g.op("Tanh", x, outputs=["x_quantized"])
    (z,) = g.op("Tanh", y, outputs=["x_QuantizeLinear_Input"])
    g.output(g.op("Concat", g.op("MatMul", x, y), z, axis=0))
    return loaded(g), 5


@pytest.mark.parametrize("make", [two_convolutions, one_table_of_words, names_of_other_tools])
def test_count_pairs_of_placement_equals_count_in_file(make, tmp_path):
    model, expected = make()
    asked = everywhere(model, ONNXRUNTIME)
    inserter = Inserter(model, ONNXRUNTIME, {name: (-3.0, 2.0) for name in model.types})
    assert diff_edges(asked, inserter.insert(asked)) == ((), ())
    assert inserter.count_pairs(asked) == count_pairs(inserter.write(asked, tmp_path)) == expected
