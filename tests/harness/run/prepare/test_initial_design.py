"""What searches start from, on a small residual net: by name, from a file, or from nothing."""

from functools import partial

import onnx
import pytest
from turns import Listening

from harness.base.errors import UserError
from harness.base.files import read_json, write_json
from harness.base.progress import NullProgress
from harness.config.experiment import load_experiment, parse_experiment, plan_tasks
from harness.graph.builder import GraphBuilder
from harness.graph.load import load, read_signature
from harness.graph.partition.patterns import find_patterns
from harness.graph.partition.regions import discover_regions
from harness.graph.pattern_cache import MeasurementOrigin, PatternCache, build_cache, write_cache
from harness.graph.qdq.import_placement import read_placement
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO, TENSORRT
from harness.measure.records import SCHEMA_VERSION
from harness.report.frames import main_frame
from harness.report.tables.notes import main_notes
from harness.results.folder import load as load_results
from harness.results.journal import read_journal
from harness.run.prepare.initial_design import (
    ExternalModel,
    InitialDesign,
    fix_imported_inputs,
    tensorrt_guide_placement,
)
from harness.run.prepare.preflight import check_experiment
from harness.run.runner import run_experiment
from search.api import Observation, Score

EXPERIMENT = """
experiment: starts
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0}}]
searchers: [random, random_mutation, local, evolutionary, annealing, nsga2, tpe, exhaustive, per_pattern]
initial: INITIAL
baselines: BASELINES
budget: {evaluations: [6]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 16, 16)), 8, 3, pad=1))
    for _ in range(2):
        x = builder.op("Relu", builder.op("Add", builder.conv(x, 8, 3, pad=1), x))
    x = builder.op("Concat", x, builder.conv(x, 8, 1), axis=1)
    builder.output(builder.op("GlobalAveragePool", x))
    builder.save(folder / "net.onnx")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load(folder / "net.onnx", source="net")


@pytest.fixture(scope="module")
def space(model):
    return build_space(model, OPENVINO)


def written(folder, name, initial, baselines="[all]"):
    path = folder / name
    path.write_text(EXPERIMENT.replace("INITIAL", initial).replace("BASELINES", baselines))
    return path


def seeding(folder, model, space, initial, foreign=(), observer=None):
    """The placements of what an experiment's only task starts from."""
    text = EXPERIMENT.replace("INITIAL", initial).replace("BASELINES", "[all]")
    experiment = parse_experiment(text, "starts.yaml", folder)
    made = InitialDesign(
        spec=plan_tasks(experiment)[0], space=space, model=model, external_models=dict(foreign),
        read=partial(read_placement, model=model), observer=observer or NullProgress(),
        facts={"name": "simulated", "device": "simulated"},
    )  # fmt: skip
    return made.placements(experiment.initial)


def run(path, out):
    run_experiment(load_experiment(path), out=out, observer=NullProgress())
    return out / "net-simulated-int8"


def roles(space, placement):
    return {d.role for d, choice in zip(space.dimensions, placement.choices, strict=True) if choice}


def test_named_placements_quantize_their_operators(folder, model, space):
    found = seeding(folder, model, space, "[linear, linear_add, linear_pool, linear_pool_concat, movers]")
    found |= seeding(folder, model, space, "[float]")
    assert {name: roles(space, placements[name]) for name, placements in found.items()} == {
        "float": set(),
        "linear": {"linear"},
        "linear_add": {"linear", "add"},
        "linear_pool": {"linear", "pool"},
        "linear_pool_concat": {"linear", "pool", "concat"},
        "movers": {"linear", "add", "pool", "concat"},
    }


def test_tensorrt_guide_quantizes_skip_operand(model, space):
    placement = tensorrt_guide_placement(space, model)
    assert roles(space, placement) == {"linear", "add", "pool"}
    quantized = {edge for edge, _ in space.resolve(placement)}
    for node in (node for node in model.nodes if node.op == "Add"):
        slots = [slot for slot in (0, 1) if any(e.consumer == node.name and e.slot == slot for e in quantized)]
        assert [model.nodes[model.producer[node.inputs[slot]]].op for slot in slots] == ["Relu"], (
            "not the convolution's"
        )


def test_tensorrt_guide_uses_operand_offered_by_dialect(model):
    space = build_space(model, TENSORRT)
    quantized = {edge.consumer for edge, _ in space.resolve(tensorrt_guide_placement(space, model))}
    assert {node.name for node in model.nodes if node.op == "Add"} <= quantized


def test_an_imported_model_gives_its_own_placement(folder, model, space):
    mine = space.quantize_roles({"linear", "pool"})
    ranges = {edge.tensor: (-1.0, 1.0) for d in space.dimensions for edge in d.edges}
    Inserter(model, OPENVINO, ranges).export(space.resolve(mine), folder / "mine.onnx")
    initial = "[float, {use: import, params: {path: mine.onnx}, label: mine}]"
    foreign = {"mine": ExternalModel(name="mine", path=folder / "mine.onnx", pairs=1)}
    found = seeding(folder, model, space, initial, foreign)
    assert space.digest(found["mine"]["mine"]) == space.digest(mine)
    task = run(written(folder, "imported.yaml", initial, "[mine, linear]"), folder / "imported")
    rows = {row["id"]: row for row in read_json(task / "rows.json")["rows"]}
    assert rows["mine"]["choices"] is None, "as a baseline it is timed as it is"


def test_an_imported_model_with_dynamic_inputs_gets_the_shapes_of_the_search(folder, model, space, tmp_path):
    ranges = {edge.tensor: (-1.0, 1.0) for d in space.dimensions for edge in d.edges}
    path = Inserter(model, OPENVINO, ranges).export(space.resolve(space.quantize_all()), tmp_path / "fixed.onnx")
    proto = onnx.load(path)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(proto, tmp_path / "dynamic.onnx")
    theirs = {name: ExternalModel(name=name, path=tmp_path / f"{name}.onnx") for name in ("fixed", "dynamic")}
    found = fix_imported_inputs(theirs, model, tmp_path / "copies")
    assert found["fixed"] == theirs["fixed"], "a file that can be timed as it is stays as it is"
    assert read_signature(found["dynamic"].path).inputs == {"x": ("float", (1, 3, 16, 16))}
    assert read_qdq_graph(found["dynamic"].path).edges == read_qdq_graph(path).edges


def test_a_pattern_cache_gives_its_best_schemes(folder, model, space):
    best = space.quantize_roles({"linear", "add"})
    told = [
        Observation(placement=placement, digest=space.digest(placement), outcome=Score(objective=latency_ms))
        for placement, latency_ms in ((space.float_placement(), 9.0), (best, 4.0))
    ]
    sizes = {pattern.signature: len(pattern.order[0]) for pattern in find_patterns(model, discover_regions(model))}
    origin = MeasurementOrigin(backend="elsewhere", precision="int8")
    write_cache(build_cache(told, space, sizes, 9.0, origin), folder / "cache.yaml")
    listening = Listening()
    initial = "[float, {use: pattern_cache, params: {path: cache.yaml, limit: 2}}]"
    found = seeding(folder, model, space, initial, observer=listening)
    assert space.digest(found["pattern_cache"]["pattern_cache"]) == space.digest(best)
    assert any("measured with backend 'elsewhere'" in sentence for sentence in listening.said)
    task = run(written(folder, "cached.yaml", initial), folder / "cached")
    marked = read_json(task / "task.json")["cache_remarks"]
    assert marked == [
        "pattern_cache: the pattern cache has schemes measured with backend 'elsewhere' instead of 'simulated', "
        "so they may be slow here"
    ]
    cached = load_results(folder / "cached")
    assert f"Initial placements of net-simulated-int8: {marked[0]}." in main_notes(cached, main_frame(cached))


def test_pattern_cache_of_earlier_run_starts_search_without_remark(folder):
    first = run(written(folder, "first.yaml", "[float, all]"), folder / "first")
    initial = "[float, {use: pattern_cache, params: {path: first/net-simulated-int8/patterns.yaml, limit: 2}}]"
    assert (first / "patterns.yaml").exists()
    task = run(written(folder, "second.yaml", initial), folder / "second")
    entries = list(read_journal(task / "runs" / "random-0.jsonl"))
    assert [entry.proposal.origin for entry in entries[:2]] == ["initial:float", "initial:pattern_cache"]
    assert any(entries[1].proposal.choices)
    assert read_json(task / "task.json")["cache_remarks"] == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pattern_cache", "the pattern cache contains none of its patterns"),
        ("sensitivity", "no unit with a gain exists in this model"),
    ],
)
def test_files_without_a_placement_for_the_model_are_named(folder, model, space, name, said):
    listening = Listening()
    write_cache(PatternCache(), folder / "pattern_cache.file")
    write_json(folder / "sensitivity.file", {"kind": name, "schema": SCHEMA_VERSION, "units": []})
    initial = f"[float, trt_guide, {{use: {name}, params: {{path: {name}.file}}}}]"
    found = seeding(folder, model, space, initial, observer=listening)
    assert found[name] == {}
    assert roles(space, found["trt_guide"]["trt_guide"]) == {"linear", "add", "pool"}
    assert said in listening.said[0]


@pytest.mark.parametrize(
    ("initial", "message"),
    [
        ("[{use: import, params: {path: gone.onnx}}]", "initial: gone.onnx: no such file or folder"),
        ("[{use: pattern_cache, params: {path: net.onnx}}]", "initial: "),
    ],
)
def test_missing_or_invalid_initial_file_is_refused_by_check(folder, initial, message):
    path = written(folder, "bad.yaml", initial)
    with pytest.raises(UserError, match=message):
        check_experiment(load_experiment(path))


def test_all_searchers_get_same_initial_placements_or_none(folder):
    for name, initial in (("cold", "none"), ("warm", "[float, linear, movers]")):
        for journal in run(written(folder, f"{name}.yaml", initial), folder / name).glob("runs/*.jsonl*"):
            entries = list(read_journal(journal))
            seeds = [entry.proposal.origin for entry in entries if entry.proposal.origin != "searcher"]
            assert seeds == ([] if name == "cold" else ["initial:float", "initial:linear", "initial:movers"]), (
                journal.name
            )
            assert len({entry.proposal.digest for entry in entries}) == 6, f"{journal.name}: the seeds count"


PLUGIN = """
def edges_of_first_pattern(space, precision):
    return space.quantize_dimensions(next(iter(space.groups.values())), precision)

def wrong(space, precision):
    return None

def without_precision(space):
    return space.float_placement()
"""


def test_function_of_a_module_is_a_fixed_placement(folder, model, space, monkeypatch):
    (folder / "own_placements.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(folder))
    found = seeding(folder, model, space, "[float, {use: 'own_placements:edges_of_first_pattern', label: first}]")
    first = set(next(iter(space.groups.values())))
    assert {i for i, choice in enumerate(found["first"]["first"].choices) if choice} == first
    path = written(folder, "plugin.yaml", "['own_placements:edges_of_first_pattern']", "[edges_of_first_pattern]")
    main = load_results(run(path, folder / "plugin").parent).tasks[0]
    assert "edges_of_first_pattern" in {pick.method for pick in main.picks}
    with pytest.raises(UserError, match="fixed placement 'own_placements:wrong'"):
        seeding(folder, model, space, "['own_placements:wrong']")
    with pytest.raises(UserError, match="no function with the parameters space, precision"):
        check_experiment(load_experiment(written(folder, "odd.yaml", "['own_placements:without_precision']")))
    monkeypatch.delenv("QDQ_TRUST_PLUGINS")
    with pytest.raises(UserError, match=r"initial\.0\.use: .*would run code of the module own_placements"):
        check_experiment(load_experiment(path))
