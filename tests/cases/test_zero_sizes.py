"""Sizes of 0, such as the empty cache of keys and values at the first step, are sizes like others, not dynamic."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from harness.accuracy.metrics.closeness import compare_outputs, plan_comparison
from harness.base.errors import EvaluationFailed, UserError
from harness.base.progress import NullProgress
from harness.compat.tao_specs.dataset import SampleShapes, sample_shape, static_inputs
from harness.config.sections import PluginSpec
from harness.graph.builder import GraphBuilder
from harness.graph.load import load, read_signature
from harness.graph.quantize.weights import quantize_weight
from harness.run.verify.dynamic_check import other_shapes, resize_array
from harness.runtimes.tensorrt.options import read_input_shapes, read_profiles
from harness.ship.placements import insert_placement

Shape = tuple[int | str | None, ...]


def first_step(folder: Path, past: int | str = 0) -> Path:
    """Write a projection of keys that are appended to a cache of the length `past`, and scores of a query."""
    g, rng = GraphBuilder("m"), np.random.default_rng(0)
    x, cache = g.input("x", (1, 4, 32)), g.input("cache", (1, 4, past, 8))
    turned = {}
    for name in ("k", "q"):
        weight = g.const(rng.normal(0, 0.2, (32, 32)).astype(np.float32), name)
        rows = g.op("Reshape", g.op("MatMul", x, weight, name=name), g.const([1, 4, 4, 8]))
        turned[name] = g.op("Transpose", rows, perm=[0, 2, 1, 3])
    present = g.op("Concat", cache, turned["k"], axis=2, outputs="present")
    keys = g.op("Transpose", present, perm=[0, 1, 3, 2])
    g.output(g.op("MatMul", turned["q"], keys, name="scores"), name="y")
    g.output(present)
    return g.save(folder / "m.onnx")


def test_size_of_0_is_read_as_a_size(tmp_path):
    path = first_step(tmp_path)
    assert read_signature(path).inputs["cache"] == ("float", (1, 4, 0, 8))
    assert read_input_shapes(onnx.load(path))["cache"] == (1, 4, 0, 8)
    assert static_inputs(read_signature(path), {})["cache"] == ("float", (1, 4, 0, 8))
    samples = SampleShapes("data", {"cache": (4, 0, 8), "x": (4, 32)})
    assert static_inputs(read_signature(path), {}, samples=samples)["cache"] == ("float", (1, 4, 0, 8))


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("sizes", [{}, {"dims": {"past": 0}}, {"shapes": {"cache": "1x4x0x8"}}])
def test_model_with_an_empty_cache_is_quantized(sizes, backend, tmp_path):
    path = first_step(tmp_path, "past" if sizes else 0)
    made = insert_placement(
        str(path), "linear", tmp_path / "q.onnx", NullProgress(), backend=PluginSpec(use=backend), precision="int8",
        **sizes,
    )  # fmt: skip
    feeds = {"x": np.random.default_rng(1).normal(size=(1, 4, 32)), "cache": np.zeros((1, 4, 0, 8))}
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
    before, after = (onnxruntime.InferenceSession(file).run(None, feeds) for file in (path, made.path))
    assert made.pairs >= 2
    for expected, found in zip(before, after, strict=True):
        assert np.abs(expected - found).max() < 0.05 * np.abs(expected).max()


def test_size_of_0_in_expressions_and_in_the_example_of_a_message(tmp_path):
    path = first_step(tmp_path, "past")
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, (1, "past + 1")))
    onnx.save(model, path)
    for sizes in ({"dims": {"past": 0}}, {"shapes": {"mask": "1x1"}}):
        types = load(path, **sizes).types
        assert (types["cache"].shape, types["mask"].shape) == ((1, 4, 0, 8), (1, 1))
    model.graph.input.append(helper.make_tensor_value_info("old", TensorProto.FLOAT, (None, None, 0)))
    onnx.save(model, path)
    with pytest.raises(UserError, match=r"old:1x\d+x0"):
        load(path, dims={"past": 0})


def test_profile_of_tensorrt_may_begin_at_0():
    profile = read_profiles({"cache": {"min": "1x4x0x8", "opt": "1x4x16x8", "max": "1x4x64x8"}})["cache"]
    assert profile.covers((1, 4, 0, 8))


def test_size_of_images_is_above_0():
    with pytest.raises(UserError, match="--size"):
        sample_shape("imagenet", "0x224", None)


def test_other_sizes_of_a_model_with_an_empty_input():
    """A static 0 stays; a dynamic one is tried at other sizes too."""
    axes: Mapping[str, Shape] = {"x": ("batch", "time"), "cache": ("batch", 0), "old": ("batch", "past")}
    given = {"x": (1, 8), "cache": (1, 0), "old": (1, 0)}
    others = list(other_shapes(axes, given))
    assert {each["cache"][1] for each in others} == {0}
    assert {each["old"][1] for each in others} > {0}
    assert all(each["old"][1] >= 0 for each in others)
    assert resize_array(np.zeros((1, 0, 3), np.float32), (2, 4, 3)).shape == (2, 4, 3)
    assert resize_array(np.ones((1, 2), np.float32), (1, 0)).shape == (1, 0)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_weights_without_values_are_quantized(shape, axis):
    made = quantize_weight(np.zeros(shape, np.float32), axis, "int8")
    assert made.values.shape == shape
    assert (made.scale > 0).all()


def test_outputs_without_values_are_compared():
    """A detector finds no box in the first image, which is no reason to leave out its boxes in the others."""
    some, none = {"boxes": np.ones((3, 4), np.float32) * [1, 2, 3, 4]}, {"boxes": np.zeros((0, 4), np.float32)}
    some["boxes"] = some["boxes"].astype(np.float32)
    layout = plan_comparison([none, some])
    assert list(layout.parts) == ["boxes"]
    found = compare_outputs([(none, none), (some, {"boxes": some["boxes"] * np.float32(1.1)})], layout).metrics
    assert found["sqnr_db"] == pytest.approx(20, abs=0.1)
    assert 0 < found["kl"] < 1
    with pytest.raises(EvaluationFailed, match="shape"):
        compare_outputs([(none, some)], layout)
    with pytest.raises(EvaluationFailed, match="nothing to compare"):
        compare_outputs([(none, none)], plan_comparison([none]))
