"""Placements without a search: written by rule, and moved to the next version of a model."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_models import activation_ranges, loaded
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
from small import qdq, save_small
from small_results import seal_bundle

from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.config.sections import PluginSpec
from harness.graph.builder import GraphBuilder
from harness.graph.io.digests import digest_file
from harness.graph.load import load
from harness.graph.model import Model
from harness.graph.qdq import import_placement
from harness.graph.qdq.import_placement import find_differences, read_placement, transfer_placement
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import count_pairs, read_qdq_graph
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO
from harness.results.folder import load as load_results
from harness.run.prepare.initial_design import InitialDesign, check_files
from harness.run.select import recovery
from harness.run.select.recovery import RECOVERY_STEPS
from harness.ship.placements import apply_experiment, insert_placement
from search.space import Edge


def retrain(path: Path, target: Path, change: Any = lambda proto: None) -> Path:
    """Write a model with other weights and other names of nodes and weights."""
    proto = onnx.load(path)
    names = {tensor.name: f"new.{tensor.name}" for tensor in proto.graph.initializer}
    for tensor in proto.graph.initializer:
        values = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array((values * 1.1).astype(values.dtype), names[tensor.name]))
    for node in proto.graph.node:
        node.name = f"new.{node.name}"
        node.input[:] = [names.get(name, name) for name in node.input]
    change(proto)
    onnx.save(proto, target)
    return target


def quantize_by_ort(path: Path, target: Path) -> Path:
    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.feeds = iter([{"x": np.random.default_rng(0).random((1, 3, 16, 16), np.float32)}])

        def get_next(self) -> Any:
            return next(self.feeds, None)

    quantize_static(path, target, Reader(), quant_format=QuantFormat.QDQ, per_channel=True)
    return target


def test_search_starts_from_an_imported_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = load(save_small(tmp_path / "net.onnx"))
    theirs = quantize_by_ort(tmp_path / "net.onnx", tmp_path / "theirs.onnx")
    assert qdq("import", "net.onnx", "net.onnx", "-o", "start.onnx") == 2
    assert "no Q/DQ pair" in capsys.readouterr().err
    opened = list[str]()
    read = import_placement.read_model
    monkeypatch.setattr(
        import_placement, "read_model", lambda path, name: [*read(path, name), opened.append(name)][:-1]
    )
    assert qdq("import", "theirs.onnx", "net.onnx", "--ranges", "-o", "start.onnx") == 0
    assert len(opened) == 1
    opened.clear()
    printed, reported = capsys.readouterr()
    space = build_space(model, OPENVINO, precisions=("int8",))
    placed = tuple(transfer_placement(tmp_path / "start.onnx", model).items())
    written = read_qdq_graph(tmp_path / "start.onnx")
    found = find_differences(read_placement(theirs, model), space, OPENVINO, placed, written, ranges=True)
    assert placed
    assert {"not expressed", "different"} <= {each.kind for each in found}
    assert all(str(each) in printed.splitlines() for each in found)
    missing = {each.edge for each in found if each.kind == "not expressed"}
    assert missing.isdisjoint(edge for edge, _ in placed)
    assert qdq("import", "theirs.onnx", "net.onnx", "--ranges", "-o", "again.onnx", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["differences"]
    assert [(each["kind"], each["edge"]["consumer"], each["reason"]) for each in listed] == [
        (each.kind, each.edge.consumer, each.reason) for each in found
    ]
    ranges = read_placement(theirs, model).ranges
    scales = {float(read_qdq_graph(theirs).values(node.input[1])) for node in quantizers(theirs)}
    assert {np.float32((high - low) / 255) for low, high in ranges.values()} <= {np.float32(each) for each in scales}
    assert {edge.tensor for dimension in space.dimensions for edge in dimension.edges} & ranges.keys()
    assert "random data" not in printed + reported, "every range is in the file"
    (entry,) = re.findall(r"initial: (.*)\]", printed)
    foreign = "{use: import, params: {path: theirs.onnx}, label: foreign}"
    Path("e.yaml").write_text(f"{SIMULATED_RUN}initial: {entry}, {foreign}]\n", encoding="utf-8")
    opened.clear()
    assert qdq("run", "e.yaml", "--out", "out") == 0
    assert len({*opened}) == len(opened) > 0
    facts = load_results(tmp_path / "out").tasks[0].facts
    (remark,) = facts["cache_remarks"]
    assert f"{len(missing)} not expressed" in remark
    assert "qdq import theirs.onnx" in remark
    assert remark in capsys.readouterr().err
    tuned = ("autotune", "-m", "net.onnx", "--backend", "simulated", "--max_evals", "6", "-o", "tuned")
    assert qdq(*tuned, "--mode", "quick", "--qdq_baseline", "theirs.onnx") == 0
    assert "not expressed" in capsys.readouterr().err
    assert f"{len(ranges.keys() & searched_tensors(space))} ranges of files" in facts["calibrated_on"]
    assert qdq("insert", "net.onnx", "--placement", "start.onnx", "-o", "again.onnx") == 0
    assert read_qdq_graph(tmp_path / "again.onnx").edges == dict(placed)


def quantizers(path: Path) -> list[onnx.NodeProto]:
    graph = read_qdq_graph(path)
    nodes = [node for node in graph.proto.graph.node if node.op_type == "QuantizeLinear"]
    return [node for node in nodes if graph.values(node.input[1]).size == 1]


def searched_tensors(space: Any) -> set[str]:
    return {edge.tensor for dimension in space.dimensions for edge in dimension.edges}


SIMULATED_RUN = """
experiment: from_theirs
models: [net.onnx]
backends: [{use: simulated, params: {seed: 1, noise: 0.0}}]
searchers: [random]
baselines: [linear]
budget: {evaluations: [4]}
confirmation: {builds: 3, rounds: 2}
"""


def export_all(path: Path, target: Path) -> Path:
    model = load(path)
    space = build_space(model, OPENVINO, precisions=("int8",))
    feed = {"x": np.random.default_rng(0).random((1, 3, 16, 16), np.float32)}
    inserter = Inserter(model, OPENVINO, activation_ranges(model, [feed]))
    return inserter.export(space.resolve(space.quantize_all()), target)


def test_placement_transfers_to_a_retrained_model(tmp_path):
    shipped = export_all(save_small(tmp_path / "net.onnx"), tmp_path / "all.onnx")
    model = load(retrain(tmp_path / "net.onnx", tmp_path / "new.onnx"))
    found = transfer_placement(shipped, model)
    space = build_space(model, OPENVINO, precisions=("int8",))
    assert found == dict(space.resolve(space.quantize_all()))
    assert {edge.consumer.startswith("new.") for edge in found if edge.consumer} == {True}


def test_a_quantized_output_transfers_and_a_float_model_has_no_placement(tmp_path):
    net = save_small(tmp_path / "net.onnx")
    model, other = load(net), load(retrain(net, tmp_path / "new.onnx"))
    edge = (Edge(model.outputs[0], "", 0), "int8")
    shipped = Inserter(model, OPENVINO, {model.outputs[0]: (-1.0, 1.0)}).export((edge,), tmp_path / "q.onnx")
    assert transfer_placement(shipped, other) == {Edge(other.outputs[0], "", 0): "int8"}
    with pytest.raises(UserError, match=r"net\.onnx: holds no Q/DQ pair, so there is no placement in it"):
        transfer_placement(net, other)


def rename_operator(proto: onnx.ModelProto) -> None:
    next(node for node in proto.graph.node if node.op_type == "Relu").op_type = "Sigmoid"


def change_attribute(proto: onnx.ModelProto) -> None:
    conv = next(node for node in proto.graph.node if node.op_type == "Conv")
    next(attribute for attribute in conv.attribute if attribute.name == "pads").ints[:] = [2, 1, 0, 1]


def change_wiring(proto: onnx.ModelProto) -> None:
    add = next(node for node in proto.graph.node if node.op_type == "Add")
    add.input[:] = reversed(add.input)


def remove_last(proto: onnx.ModelProto) -> None:
    proto.graph.output[0].name = proto.graph.node.pop().input[0]


def narrow_weight(proto: onnx.ModelProto) -> None:
    """Give the convolution before the Add one channel."""
    conv = [node for node in proto.graph.node if node.op_type == "Conv"][-1]
    for tensor in proto.graph.initializer:
        if tensor.name in conv.input:
            narrow = numpy_helper.to_array(tensor)[:1]
            tensor.CopyFrom(numpy_helper.from_array(narrow, tensor.name))


def add_output(proto: onnx.ModelProto) -> None:
    proto.graph.output.append(onnx.helper.make_tensor_value_info(proto.graph.node[0].output[0], 1, None))


def shrink_input(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 12


def drop_bias(proto: onnx.ModelProto) -> None:
    next(node for node in proto.graph.node if node.op_type == "Conv").input.pop()


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (rename_operator, "Sigmoid"),
        (change_attribute, "attributes"),
        (change_wiring, "counterpart"),
        (remove_last, "nothing"),
        (narrow_weight, "has shape [1, 12, 1, 1], but [12, 12, 1, 1] there"),
        (add_output, "1 inputs and 2 outputs, but 1 and 1 there"),
        (shrink_input, "input 'x' has shape 1x3x12x16, but 1x3x16x16 there"),
        (drop_bias, "has 2 inputs and 1 outputs"),
    ],
)
def test_different_structure_is_refused_naming_the_difference(tmp_path, change, fact):
    shipped = export_all(save_small(tmp_path / "net.onnx"), tmp_path / "all.onnx")
    model = loaded(onnx.load(retrain(tmp_path / "net.onnx", tmp_path / "new.onnx", change)))
    with pytest.raises(UserError, match="structure") as refused:
        transfer_placement(shipped, model)
    assert fact in str(refused.value)


def test_insert_applies_a_rule_or_stored_placement(tmp_path, capsys):
    net, first, second = save_small(tmp_path / "net.onnx"), tmp_path / "a.onnx", tmp_path / "b.onnx"
    np.save(tmp_path / "calib.npy", np.random.default_rng(0).random((4, 3, 16, 16), np.float32))
    data = ["--calibration", str(tmp_path / "calib.npy")]
    assert qdq("insert", str(net), "-o", str(first), "--placement", "linear", "--backend", "tensorrt", *data) == 0
    assert f"{first}: {count_pairs(first)} Q/DQ pairs" in capsys.readouterr().out
    assert qdq("insert", str(net), "-o", str(second), *data, "--samples", "3", "--no-run") == 0
    assert "the first 3 of 4 calibration samples are used" in capsys.readouterr().err
    assert qdq("insert", str(net), "-o", str(second), "--placement", str(first), "--backend", "tensorrt", *data) == 0
    assert digest_file(first) == digest_file(second)
    assert qdq("insert", str(net), "-o", str(second), "--placement", "float", *data, "--no-run") == 0
    assert "calibrated on no data, because nothing is quantized" in capsys.readouterr().out
    assert qdq("insert", str(net), "-o", str(net)) == 2
    for wrong, remedy in {"linar": "linear", "modelopt_ptq": "ptq", "ship/gone": "no such"}.items():
        assert qdq("insert", str(net), "-o", str(second), "--placement", wrong) == 2
        assert remedy in capsys.readouterr().err


def test_rule_that_quantizes_nothing_is_refused_with_the_causes(tmp_path):
    builder = GraphBuilder("m")
    product = builder.op("MatMul", builder.input("x", (4,)), builder.const(np.ones((4, 4), np.float32)))
    builder.output(builder.op("Relu", product))
    path = builder.save(tmp_path / "m.onnx")
    with pytest.raises(UserError, match=r"quantizes nothing .* 1 of 1 convolutions and products .*'vector'.* batch"):
        insert_placement(
            str(path), "linear", tmp_path / "q.onnx", NullProgress(), backend=PluginSpec(use="onnxruntime"),
            precision="int8",
        )  # fmt: skip
    assert not (tmp_path / "q.onnx").exists()


def test_apply_measures_the_placement_in_a_new_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shipped = export_all(save_small(tmp_path / "net.onnx"), tmp_path / "ship/net/net.onnx")
    stored = {
        "experiment": "mine",
        "models": [{"use": "net.onnx", "calibration": {"samples": 2}}],
        "backends": [{"use": "simulated", "params": {"seed": 3, "noise": 0.0}}],
        "precision": ["int8"],
        "confirmation": {"builds": 3, "rounds": 2, "samples": 3},
    }
    seal_bundle(shipped.parent, experiment=stored)
    new = retrain(tmp_path / "net.onnx", tmp_path / "new.onnx")
    assert apply_experiment(shipped.parent, new, {}, tmp_path, builds=9).confirmation.builds == 9
    assert qdq("apply", str(shipped.parent), str(new), "--out", "out") == 0
    assert "applied" in capsys.readouterr().out
    (task,) = load_results(tmp_path / "out").tasks
    (choice,) = (pick for pick in task.picks if pick.method == "applied")
    exported = task.folder / "models" / task.rows[choice.row].file
    assert len(read_qdq_graph(exported).edges) == len(read_qdq_graph(shipped).edges)
    text = (tmp_path / "out/experiment.yaml").read_text()
    assert str(tmp_path) not in text
    assert "samples: 2" in text, "the calibration of the earlier run"
    other = retrain(tmp_path / "net.onnx", tmp_path / "other.onnx", rename_operator)
    assert qdq("apply", str(shipped.parent), str(other), "--out", "again") == 2
    assert "Sigmoid" in capsys.readouterr().err
    assert not (tmp_path / "again").exists(), "a corrected command can use the same folder"


def stored_experiment(**changes: Any) -> dict[str, Any]:
    return {
        "experiment": "mine",
        "models": [{"use": "net.onnx", "calibration": {"samples": 8}, "evaluator": "fidelity"}],
        "backends": ["openvino"],
        "precision": ["int8"],
        "confirmation": {"builds": 3, "rounds": 2, "samples": 3, "candidates": 2},
        **changes,
    }


@pytest.fixture
def applied(tmp_path):
    """Return the experiment that applies a placement, shipped with these facts, to its own model."""
    export_all(save_small(tmp_path / "net.onnx"), tmp_path / "ship/net/net.onnx")

    def apply(**facts: Any) -> Any:
        seal_bundle(tmp_path / "ship/net", **facts)
        return apply_experiment(tmp_path / "ship/net", tmp_path / "net.onnx", {}, tmp_path, builds=3)

    return apply


@pytest.mark.parametrize(
    ("objective", "repeated"),
    [({"max_drop": 100.0}, True), ({"max_drop": 100.0, "recover": False}, False), ({"minimize": "latency"}, False)],
)
def test_apply_repeats_recovery_if_the_objective_allows(applied, objective, repeated):
    experiment = applied(experiment=stored_experiment(objective=objective))
    assert [searcher.name for searcher in experiment.searchers] == ["recovered"] * repeated


@pytest.mark.parametrize(
    "evaluator",
    [
        "__main__:accuracy",
        {"use": "metric", "params": {"function": "__main__:accuracy", "data": {"use": "npz", "path": "test.npz"}}},
    ],
)
def test_apply_compares_by_fidelity_without_the_metric_of_a_program(evaluator, applied, caplog):
    """Only the program itself has the function; the file is compared with the float model on the same data."""
    data = {"use": "npy", "path": "calib.npy"}
    model = {"use": "net.onnx", "calibration": {"data": data}, "evaluator": evaluator}
    experiment = applied(experiment=stored_experiment(models=[model], objective={"max_drop": 0.01, "halves": True}))
    test_data = evaluator["params"]["data"] if isinstance(evaluator, dict) else data
    used = experiment.models[0].evaluator
    assert (used.use, used.params, experiment.objective.max_drop) == ("fidelity", {"data": test_data}, None)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "accuracy" in line
    assert "qdq.autotune" in line


def test_what_depends_on_the_method_and_the_old_weights(applied):
    experiment = applied(experiment=stored_experiment(), method="ort_dynamic")
    assert (list(experiment.baselines), list(experiment.initial)) == (["ort_dynamic"], []), "the tool runs again"
    stored = stored_experiment()
    stored["models"][0]["expect"] = 0.78
    assert applied(experiment=stored).models[0].expect is None, "the expected score of the old weights"
    with pytest.raises(UserError, match="float model"):
        applied(experiment=stored_experiment(), method="float")
    for damaged in ({}, {"models": 3}, {"models": [{"use": "net.onnx", "calibration": 3}]}, {"confirmation": 3}):
        with pytest.raises(UserError, match="experiment"):
            applied(experiment={**({"models": [{"use": "net.onnx"}]} if "confirmation" in damaged else {}), **damaged})


@pytest.mark.slow
def test_apply_prints_the_steps_that_gain_on_the_new_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    export_all(save_small(tmp_path / "net.onnx"), tmp_path / "ship/net/net.onnx")
    seal_bundle(tmp_path / "ship/net", experiment=stored_experiment(objective={"max_drop": 119.0}))
    new = retrain(tmp_path / "net.onnx", tmp_path / "new.onnx")
    monkeypatch.setattr(recovery, "surely_within", lambda *_, **__: False)  # such a placement is not recovered
    assert qdq("apply", "ship/net", str(new), "--out", "out") == 0
    (task,) = load_results(tmp_path / "out").tasks
    assert {"applied", "recovered"} <= {pick.method for pick in task.picks}
    (facts,) = task.recovery.values()
    assert [step["step"] for step in facts["steps"]] == list(RECOVERY_STEPS)
    text = capsys.readouterr().out
    assert "Recovery" in text
    assert all(step["step"] in text for step in facts["steps"] if step["kept"])


def read_initial(path: Path, model: Model) -> dict[Edge, str]:
    """Return the edges of the only entry of `initial`."""
    space = build_space(model, OPENVINO, precisions=("int8",))
    entry = PluginSpec(use="placement", params={"path": str(path)}, label="mine")
    check_files([entry])
    unused: Any = None
    design = InitialDesign(
        spec=unused, space=space, model=model, external_models={}, read=partial(read_placement, model=model),
        observer=NullProgress(), facts={},
    )  # fmt: skip
    return dict(space.resolve(design.placements([entry])["mine"]["mine"]))


def test_initial_placement_from_file_deploy_folder_or_results(tmp_path):
    shipped = export_all(save_small(tmp_path / "net.onnx"), tmp_path / "ship/net/net.onnx")
    seal_bundle(shipped.parent, experiment={})
    model = load(tmp_path / "net.onnx")
    (wanted,) = {frozenset(read_initial(path, model)) for path in (tmp_path, *shipped.parents[:2], shipped)}
    assert wanted == set(read_qdq_graph(shipped).edges)
    theirs = quantize_by_ort(tmp_path / "net.onnx", tmp_path / "theirs.onnx")
    convolutions = {edge for edge in wanted if edge.consumer.startswith("Conv")}
    assert convolutions <= set(read_initial(theirs, model)) < wanted
    shutil.copytree(shipped.parent, tmp_path / "ship/other")
    refused = {tmp_path: "several", tmp_path / "net.onnx": "no Q/DQ pair", tmp_path / "gone": "no such"}
    (tmp_path / "empty").mkdir()
    for path, fact in {**refused, tmp_path / "empty": "no folder to deploy"}.items():
        with pytest.raises(UserError, match=fact):
            read_initial(path, model)
    shipped.write_bytes(b"")
    with pytest.raises(UserError, match="damaged"):
        read_initial(shipped.parent, model)
