"""Calls of the autotuner step by step, and messages for steps in another order."""

import onnx
import pytest

from harness.base.errors import UserError
from harness.compat.modelopt_autotune import (
    AutotunerError,
    AutotunerNotInitializedError,
    Config,
    InvalidSchemeError,
    NodeInputInsertionPoint,
    PatternCache,
    QDQAutotuner,
    QDQAutotunerBase,
    Region,
    RegionType,
)
from harness.compat.modelopt_autotune.qdq_utils import get_quantized_tensors
from harness.graph.qdq.qdq_graph import QDQGraph


def start(model, cache=None, **settings):
    autotuner = QDQAutotuner(model)
    autotuner.initialize(Config(**settings), cache)
    autotuner.submit(10.0)
    return autotuner


def profile_all(autotuner, latency, limit=1000):
    """Measure region after region; the schemes that were asked for, by region."""
    asked = {}
    for number, region in enumerate(autotuner.regions):
        autotuner.set_profile_region(region, commit=number > 0)
        while autotuner.current_profile_pattern_schemes is not None and len(asked.get(region.id, ())) < limit:
            index = autotuner.generate()
            if index == -1:
                break
            asked.setdefault(region.id, []).append(autotuner.current_profile_pattern_schemes.schemes[index].hash)
            autotuner.submit(latency(autotuner))
    autotuner.set_profile_region(None, commit=True)
    return asked


def fewer_is_slower(autotuner):
    return 10.0 - len(autotuner.get_resolved_insertion_points(best=False)) / 10


def measure(autotuner, region, count, latency=fewer_is_slower, **submitted):
    """Measure `count` schemes of a region; return their indices."""
    autotuner.set_profile_region(region)
    found = []
    for _ in range(count):
        found.append(autotuner.generate())
        assert found[-1] >= 0
        autotuner.submit(latency(autotuner) if callable(latency) else latency, **submitted)
    return found


def exported(autotuner, **options):
    return onnx.ModelProto.FromString(autotuner.export_onnx(**options))


def resumed(model, path):
    autotuner = QDQAutotuner(model)
    autotuner.initialize(Config())
    autotuner.load_state(str(path))
    return autotuner


def test_first_latency_is_the_baseline_and_best_schemes_win(model):
    autotuner = start(model)
    assert autotuner.baseline_latency_ms == 10.0
    asked = profile_all(autotuner, fewer_is_slower)
    assert 0 < len(asked) == len(autotuner.profiled_patterns) < len(autotuner.regions)
    everything = {edge for d in autotuner.session.space.dimensions for edge in d.edges}
    assert len(autotuner.get_resolved_insertion_points()) == len(everything)
    assert all(each.best_scheme.latency_ms <= min(s.latency_ms for s in each.schemes)
               for each in autotuner.profiled_patterns)  # fmt: skip


def test_get_ort_quantization_config_describes_the_placement(model):
    autotuner = start(model)
    assert autotuner.get_ort_quantization_config()[0] == []
    profile_all(autotuner, fewer_is_slower)
    nodes, ops, left, before_activations = autotuner.get_ort_quantization_config()
    covered = {
        (p.node_index, p.input_index) for p in autotuner.get_resolved_insertion_points() if p.node_index is not None
    }
    by_name = {node.name: node for node in autotuner.graph.nodes}
    assert {autotuner.graph.nodes[index].name for index, _ in covered} <= set(nodes)
    assert {by_name[name].op for name in nodes} <= set(ops)
    for producer, reader, tensor in left:
        assert tensor in producer.outputs
        assert (reader.index, list(reader.inputs).index(tensor)) not in covered
    assert set(before_activations) <= {node.op for node in autotuner.graph.nodes}


def test_a_choice_applies_to_every_region_of_its_pattern(model):
    autotuner = start(model)
    leaves = [region for region in autotuner.regions if region.type is RegionType.LEAF]
    patterns = [autotuner.graph.pattern(region) for region in leaves]
    twice = next(region for region, pattern in zip(leaves, patterns, strict=True) if patterns.count(pattern) == 2)
    measure(autotuner, twice, 5)
    proto = exported(autotuner, best=True)
    consumers = {edge.consumer for edge in QDQGraph(proto).edges}
    assert {name.replace("0", "#").replace("1", "#") for name in consumers if "block0" in name} == {
        name.replace("0", "#").replace("1", "#") for name in consumers if "block1" in name
    }  # fmt: skip


def test_generate_returns_minus_one_if_nothing_new_is_left(model):
    autotuner = start(model)
    asked, digests = profile_all(autotuner, lambda _: 5.0), list(autotuner.session.measured)
    assert len(digests) == 1 + sum(map(len, asked.values())) == len(set(digests))
    assert autotuner.session.measured[digests[0]].latency_ms == 10.0
    autotuner.profiled_patterns.clear()
    autotuner.set_profile_region(autotuner.regions[0])
    assert autotuner.generate() == -1


def test_generate_repeats_a_scheme_until_submit(model):
    autotuner = start(model)
    autotuner.set_profile_region(autotuner.regions[0])
    index = autotuner.generate()
    assert autotuner.generate() == index
    autotuner.submit(4.0)
    assert autotuner.generate() != index


def test_a_failed_scheme_is_an_error_and_never_the_best(model):
    autotuner = start(model)
    for index in measure(autotuner, autotuner.regions[0], 3, float("inf"), success=False):
        assert autotuner.current_profile_pattern_schemes.schemes[index].error
    assert autotuner.current_profile_pattern_schemes.best_scheme.is_empty
    assert autotuner.export_onnx(best=True) == autotuner.export_onnx(insert_qdq=False)


def test_export_onnx_inserts_exactly_the_resolved_points(model, tmp_path):
    autotuner = start(model)
    autotuner.set_profile_region(autotuner.regions[0])
    while not autotuner.get_resolved_insertion_points(best=False):
        autotuner.generate()
        autotuner.submit(9.0)
    path = tmp_path / "sub" / "candidate.onnx"
    content = autotuner.export_onnx(str(path))
    assert path.read_bytes() == content
    proto = onnx.ModelProto.FromString(content)
    onnx.checker.check_model(proto)
    index = {node.name: node.index for node in autotuner.graph.nodes}
    found = {(edge.tensor, index[edge.consumer], edge.slot) for edge in QDQGraph(proto).edges}
    points = autotuner.get_resolved_insertion_points(best=False)
    assert found == {(p.tensor_name, p.node_index, p.input_index) for p in points}
    assert QDQGraph(exported(autotuner, insert_qdq=False)).edges == {}
    transformed = exported(autotuner, model_transform=lambda proto: proto.__class__(producer_name="transformed"))
    assert transformed.producer_name == "transformed"


def test_steps_out_of_order_name_the_missing_step(model):
    autotuner = QDQAutotuner(model)
    with pytest.raises(AutotunerNotInitializedError, match=r"QDQAutotuner: call initialize\(\) first"):
        autotuner.submit(1.0)
    autotuner.initialize()
    with pytest.raises(AutotunerError, match="the float model has no latency"):
        autotuner.submit(float("inf"))
    autotuner.submit(1.0)
    with pytest.raises(InvalidSchemeError, match=r"call set_profile_region\(\) first"):
        autotuner.generate()
    with pytest.raises(InvalidSchemeError, match=r"call set_profile_region\(\) and generate\(\) first"):
        autotuner.submit(1.0)
    with pytest.raises(ValueError, match="region 99 is none of the autotuner's regions"):
        autotuner.set_profile_region(Region(99, 0, RegionType.LEAF))
    with pytest.raises(TypeError, match=r"a model is an onnx.ModelProto or an onnx_graphsurgeon.Graph, but got str"):
        QDQAutotuner("model.onnx")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"default_quant_type": "int4"}, "default_quant_type: one of int8, fp8, but got 'int4'"),
        ({"default_dq_dtype": "double"}, "default_dq_dtype: one of float16, float32, bfloat16, but got 'double'"),
        ({"calibration_samples": 0}, "calibration_samples"),
        (
            {"default_quant_type": "fp8", "backend": "onnxruntime"},
            r"quant_type 'fp8': dialect 'onnxruntime(_7bit)?' has int8",
        ),
    ],
)
def test_invalid_settings_are_refused(model, settings, message):
    with pytest.raises(AutotunerError, match=message):
        start(model, **settings)


def test_backend_and_precision_decide_the_pair_types(model):
    made = {}
    for name, settings in {"fp8": {"default_quant_type": "fp8"}, "uint8": {"backend": "onnxruntime"}}.items():
        autotuner = start(model, **settings)
        profile_all(autotuner, fewer_is_slower, limit=4)
        made[name] = exported(autotuner)
    assert set(QDQGraph(made["fp8"]).edges.values()) == {"fp8"}
    zero_points = {t.data_type for t in made["uint8"].graph.initializer if "zero" in t.name}
    assert onnx.TensorProto.UINT8 in zero_points


def test_default_dq_dtype_applies_to_uninferable_tensors(make_small):
    builder = make_small()
    proto = builder.build()
    conv = next(node for node in proto.graph.node if node.op_type == "Conv")
    proto.graph.node.insert(0, onnx.helper.make_node("Mystery", list(conv.input[:1]), ["y"], domain="acme"))
    conv.input[0] = "y"
    proto.opset_import.append(onnx.helper.make_opsetid("acme", 1))
    autotuner = QDQAutotuner(proto)
    for dtype, known in (("float16", "float16"), ("float32", "float")):
        autotuner.initialize(Config(default_dq_dtype=dtype))
        assert autotuner.graph.model.types["y"].dtype == known
    region = next(r for r in autotuner.regions if any(autotuner.graph.nodes[n].name == conv.name for n in r.nodes))
    points = NodeInputInsertionPoint.collect_from_region(region, autotuner.graph)
    assert "y" in {p.tensor_name for point in points for p in point.resolve(region, autotuner.graph)}
    autotuner.submit(10.0)  # ONNX Runtime cannot run the model, so there are no ranges
    profile_all(autotuner, fewer_is_slower, limit=5)
    written = exported(autotuner)
    scales = {
        float(onnx.numpy_helper.to_array(t)) for t in written.graph.initializer if "scale" in t.name and not t.dims
    }
    assert min(scales) == pytest.approx(0.1, rel=0.01)


def test_imported_insertion_points_are_tried_first(model):
    done = start(model)
    profile_all(done, fewer_is_slower)
    tensors = get_quantized_tensors(exported(done))
    autotuner = start(model)
    autotuner.import_insertion_points(sorted(tensors))
    everything = done.get_resolved_insertion_points()
    assert autotuner.get_resolved_insertion_points() == everything
    assert autotuner.pattern_cache.num_patterns == done.pattern_cache.num_patterns
    autotuner.set_profile_region(autotuner.regions[0])
    autotuner.generate()
    assert autotuner.get_resolved_insertion_points(best=False) == everything
    autotuner = start(model)
    autotuner.import_insertion_points({"x_QuantizeLinear_Output", "nothing_quantized", "stem.weight"})
    assert {p.tensor_name for p in autotuner.get_resolved_insertion_points() if p.input_index == 0} == {"x"}


@pytest.mark.parametrize("searcher", ["random_mutation", "tpe"])
def test_scheme_slower_than_the_current_one_is_never_kept(model, searcher):
    autotuner = start(model, searcher=searcher)
    measure(autotuner, autotuner.session.placement_map.whole, 4, 12.0)
    autotuner.set_profile_region(None, commit=True)
    assert autotuner.placement(best=True) == autotuner.session.space.float_placement()


def test_custom_regions_are_profiled_as_they_are(model):
    class Custom(QDQAutotunerBase):
        def __init__(self, model, custom_regions):
            super().__init__(model)
            self.regions = custom_regions

    names = [node.op for node in QDQAutotunerBase(model).graph.nodes]
    first = Region(0, 0, RegionType.LEAF)
    first.nodes = {names.index("Conv"), names.index("Relu")}
    second = Region(1, 0, RegionType.LEAF)
    second.nodes = {len(names) - 1}
    autotuner = Custom(model, [first, second])
    autotuner.initialize(Config())
    assert autotuner.regions == [first, second]
    autotuner.submit(10.0)
    profile_all(autotuner, fewer_is_slower)
    points = autotuner.get_resolved_insertion_points()
    assert names[2] == "MaxPool", "it reads what leaves the first region"
    assert {p.node_index for p in points} <= {0, 1, 2, len(names) - 1}
    assert {p.node_index for p in points} >= {0, len(names) - 1}


def test_regions_that_overlap_or_leave_the_model_are_refused(model):
    autotuner = QDQAutotunerBase(model)
    first, second = Region(0, 0, RegionType.LEAF), Region(1, 0, RegionType.LEAF)
    first.nodes, second.nodes = {0}, {0}
    autotuner.regions = [first, second]
    autotuner.initialize()
    with pytest.raises(AutotunerError, match="is in 2 regions; each node belongs to one LEAF"):
        autotuner.submit(1.0)
    second.nodes = {1000}
    with pytest.raises(AutotunerError, match=r"has nodes 0 to .*, but got 1000"):
        autotuner.submit(1.0)


def test_loaded_state_continues_with_the_same_proposals(model, tmp_path):
    path = tmp_path / "autotuner_state.yaml"
    whole = start(model)
    expected = profile_all(whole, fewer_is_slower)
    broken = start(model)
    first, second = (list(asked) for asked in list(expected.values())[:2])
    for region, count in zip(broken.regions[:2], (1000, 3), strict=True):
        broken.set_profile_region(region)
        while count and broken.generate() >= 0:
            broken.submit(fewer_is_slower(broken))
            count -= 1
    broken.save_state(str(path))
    later = resumed(model, path)
    assert later.baseline_latency_ms == 10.0
    again = profile_all(later, fewer_is_slower)
    assert len(first) > 3
    assert len(second) > 3
    assert next(iter(again.values())) == second[3:]
    assert later.get_resolved_insertion_points() == whole.get_resolved_insertion_points()
    assert (tmp_path / "autotuner_state_pattern_cache.yaml").exists()
    assert later.pattern_cache.num_patterns == whole.pattern_cache.num_patterns


def test_state_of_another_model_or_missing_path_is_refused(model, make_small, tmp_path):
    path = tmp_path / "state.yaml"
    start(model).save_state(str(path))
    other = start(make_small(3).build())
    with pytest.raises(UserError, match="model_sha256"):
        other.load_state(str(path))
    with pytest.raises(FileNotFoundError):
        other.load_state(str(tmp_path / "none.yaml"))
    with pytest.raises(UserError, match="cannot be written"):
        other.save_state(str(path / "state.yaml"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "a: [", "not valid YAML"),
        (lambda text: "baseline_latency_ms: 3.0\npatterns: []\n", r"no state of this autotuner \(ModelOpt's cannot"),
        (lambda text: text.replace("baseline_latency_ms: 10.0", "other: 1"), "damaged"),
        (lambda text: text.replace("patterns: []", "patterns: [{schemes: 3}]"), "damaged .*no schemes of a pattern"),
        (lambda text: text.replace("latency_ms: 10.0, stderr", "latency_ms: .nan, stderr"), "damaged"),
    ],
)
def test_a_damaged_state_is_refused(model, tmp_path, change, message):
    path = tmp_path / "state.yaml"
    autotuner = start(model)
    autotuner.save_state(str(path))
    text = path.read_text()
    path.write_text(change(text))
    assert path.read_text() != text
    with pytest.raises(UserError, match=message):
        autotuner.load_state(str(path))


def test_pattern_cache_round_trips_through_file_and_dict(model, tmp_path):
    autotuner = start(model)
    profile_all(autotuner, fewer_is_slower, limit=6)
    cache = autotuner.pattern_cache
    cache.save(str(tmp_path / "cache.yaml"))
    loaded = PatternCache.load(str(tmp_path / "cache.yaml"))
    assert (loaded.num_patterns, loaded.total_schemes) == (cache.num_patterns, cache.total_schemes)
    assert loaded.content == cache.content
    assert PatternCache.from_dict(cache.to_dict()).num_patterns == cache.num_patterns
    empty = PatternCache()
    empty.merge(loaded)
    assert empty.content.patterns == loaded.content.patterns
    with pytest.raises(FileNotFoundError):
        PatternCache.load(str(tmp_path / "none.yaml"))
