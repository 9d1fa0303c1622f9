"""Checks of experiment files: every message names the place, the problem and the alternative."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from harness.base.errors import UserError
from harness.base.text import shorten_values
from harness.config.experiment import load_experiment, parse_experiment, plan_tasks, to_yaml
from harness.config.yaml_loader import dump_yaml

MINIMAL = "experiment: e\nmodels: [zoo:resnet18]\n"


def error(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_experiment(text, "e.yaml")
    return str(caught.value)


def test_bare_name_is_a_plugin_without_parameters():
    experiment = parse_experiment(MINIMAL + "searchers: [random, {use: tpe, params: {n: 3}, label: mine}]", "e.yaml")
    assert [(s.name, s.use, s.params) for s in experiment.searchers] == [
        ("random", "random", {}),
        ("mine", "tpe", {"n": 3}),
    ]


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("budget: {evaluations: [5, 10], minutes: 2.5}\ninitial: [float]", lambda e: e.budget.minutes == 2.5),
        ("", lambda e: [s.use for s in e.initial[:5]] == ["float", "all", "linear", "linear_add", "movers"]),
        ("", lambda e: [s.use for s in e.initial[5:]] == ["modelopt_ptq", "ort_static"]),
        ("initial: []\nbudget: {evaluations: [1]}", lambda e: e.initial == ()),
        ("initial: none\nbudget: {evaluations: [1]}", lambda e: e.initial == ()),
        (
            "initial: [float, {use: import, params: {path: q.onnx}, label: mine}]\nbaselines: [mine, movers]",
            lambda e: (e.initial[1].name, e.baselines) == ("mine", ("mine", "movers")),
        ),
    ],
)
def test_experiments_survive_a_round_trip_through_yaml(text, check):
    experiment = parse_experiment(MINIMAL + text, "e.yaml")
    assert check(experiment)
    assert parse_experiment(to_yaml(experiment), "again") == experiment


def test_removed_key_without_effect_is_accepted():
    assert parse_experiment(MINIMAL + "prescreening: null", "stored") == parse_experiment(MINIMAL, "now")


def test_yaml_has_every_default():
    resolved = yaml.safe_load(to_yaml(parse_experiment(MINIMAL, "e.yaml")))
    assert resolved["confirmation"]["builds"] == 5
    assert resolved["sampling"]["target"] == 0.01


@pytest.mark.parametrize("shape", ["1x3x8x8", "[1, 3, 8, 8]"])
def test_shapes_are_text_or_lists(shape):
    experiment = parse_experiment(f"experiment: e\nmodels: [{{use: m.onnx, shapes: {{x: {shape}}}}}]", "e.yaml")
    assert experiment.models[0].shapes == {"x": "1x3x8x8"}


def test_matrix_multiplies_a_list_and_labels_each_copy():
    matrix = "matrix: {backends.params.threads: [1, 2], backends.params.precision: [f32]}"
    experiment = parse_experiment(f"{MINIMAL}backends: [openvino]\n{matrix}", "e.yaml")
    assert [b.params for b in experiment.backends] == [{"threads": t, "precision": "f32"} for t in (1, 2)]
    names = [f"resnet18-openvino-threads-{t}-precision-f32-int8" for t in (1, 2)]
    assert [task.name for task in plan_tasks(experiment)] == names
    experiment = parse_experiment(MINIMAL + "matrix: {models.calibration: [{samples: 3}, {samples: 4}]}", "e.yaml")
    assert [(m.name, m.calibration.samples) for m in experiment.models] == [
        ("resnet18-calibration-0", 3),
        ("resnet18-calibration-1", 4),
    ]


def test_plan_runs_every_searcher_at_the_first_seed_before_the_second():
    experiment = parse_experiment(MINIMAL + "searchers: [random, tpe]\nseeds: [7, 8]", "e.yaml")
    assert [run.name for run in plan_tasks(experiment)[0].runs] == ["random-7", "tpe-7", "random-8", "tpe-8"]


def test_relative_paths_start_from_the_file_unless_another_folder_is_given(tmp_path):
    file = tmp_path / "e.yaml"
    file.write_text(MINIMAL + "backends: [{use: replay, params: {table: t.parquet}}]")
    for folder, experiment in (
        (tmp_path, load_experiment(file)),
        (tmp_path / "other", load_experiment(file, tmp_path / "other")),
    ):
        assert experiment.models[0].base_dir == folder
        assert plan_tasks(experiment)[0].backend.params["base"] == str(folder)
        assert "base" not in to_yaml(experiment).replace("baselines", "")
        assert experiment == load_experiment(file)


STARTS = MINIMAL + "initial: [{}]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("experiment: e\nmodel: [a]", "e.yaml: model: unknown key; did you mean 'models'?"),
        (MINIMAL + "evaluations: [3]", "evaluations: unknown key; it belongs below budget"),
        (MINIMAL + "backends: [{use: x, threads: 2}]", "backends.0.threads: .* below params: {params: {threads: "),
        (MINIMAL + "backends: [{use: x, precision: f32}]", "below params: {params: {precision: "),
        (MINIMAL + f"{'k' * 1000}: 1", rf"e.yaml: {'k' * 200}\.\.\.: unknown key"),
        (MINIMAL + "sharing: patern", "sharing: .*'pattern' or 'region', but got 'patern'; did you mean"),
        (MINIMAL + f"seeds: [{', '.join('abcdefghijklmnopqrstuvwxyz')}]", "\nand 6 more$"),
        (MINIMAL + f"seeds: [{'x' * 1000}]", rf"'{'x' * 199}\.\.\."),
        (MINIMAL + "budget: {evaluation: [3]}", "budget.evaluation: unknown key; did you mean 'evaluations'?"),
        ("experiment: e\nmodels: []", r"models: .* at least one entry, but got \[\]"),
        (MINIMAL + "seeds: [x]", "seeds.0: .*valid integer, but got 'x'"),
        (MINIMAL + "precision: [int4]", "precision.0: .*'int8', 'fp8', 'fp8e5m2' or 'mixed', but got 'int4'"),
        (MINIMAL + "budget: {evaluations: [0]}", "budget.evaluations.0: .*greater than or equal to 1"),
        ("experiment: e", "models: this key is required"),
        ("experiment: ../up\nmodels: [a]", "'../up' is no folder name"),
        (f"experiment: {'e' * 101}\nmodels: [a]", "is no folder name; use at most 100 letters"),
        (MINIMAL + "searchers: [{use: random, label: a/b}]", "searchers: 'a/b' is no folder name"),
        (MINIMAL + "backends: [{use: openvino, label: ../x}]", "backends: '../x' is no folder name"),
        ("experiment: e\nmodels: [a/m.onnx, b/m.onnx]", "models: m appears twice; .*'label'"),
        (MINIMAL + "seeds: [3, 4, 3]", "e.yaml: seeds: 3 appears twice"),
        (MINIMAL + "baselines: [all, all]", "baselines: 'all' appears twice"),
        (MINIMAL + "precision: [int8, int8]", "precision: 'int8' appears twice"),
        (MINIMAL + "budget: {evaluations: [9, 9]}", "budget.evaluations: 9 appears twice"),
        (MINIMAL + "baselines: [float]", "baselines: no baseline is called 'float'"),
        (MINIMAL + "baselines: [mine]", "baselines: no baseline is called 'mine'"),
        (MINIMAL + "budget: {evaluations: [5]}", "budget.evaluations: .*7 placements.*but got 5"),
        (STARTS.format("all, all"), "initial: all appears twice"),
        (
            MINIMAL + "prescreening: sm89",
            "prescreening: this key was removed; qdq-bench 0.1.0 at commit f7c262ac reads",
        ),
        (STARTS.format("predicted"), "initial: 'predicted' was removed; qdq-bench 0.1.0 at commit f7c262ac reads it"),
        (STARTS.format("linaer"), "initial: .*'linaer'; did you mean 'linear'"),
        (STARTS.format("import"), "'import' needs a file: {use: import, params: {path: ...}}"),
        (STARTS.format("{use: linear, params: {path: a}}"), "initial: 'linear' has no parameter 'path'"),
        (STARTS.format("{use: import, params: {path: 3}}"), "'import': path is the name of a file, but got 3"),
        (STARTS.format("{use: pattern_cache, params: {path: a, limit: 99}}"), "limit is 1 to 32, but got 99"),
        (STARTS.format("{use: linear, label: mine}"), "'linear' keeps its own name, but got the label 'mine'"),
        (STARTS.format("{use: import, params: {path: a}, label: linear}"), "keeps its own name.*'linear'"),
        (STARTS.format("{use: import, params: {path: a}, label: float-bf16}"), "label 'float-bf16' is the name of ano"),
        (
            STARTS.format(
                "{use: pattern_cache, params: {path: a, limit: 2}, label: c}, "
                "{use: import, params: {path: b}, label: c-2}"
            ),
            "label 'c-2' is the name of another row",
        ),
        (STARTS.format("{use: import, params: {path: a}, label: ../b}"), "initial: '../b' is no folder name"),
        (
            STARTS.format("{use: pattern_cache, params: {path: a, limit: 9}}") + "\nbudget: {evaluations: [9]}",
            "9 placements of 'initial'",
        ),
        (MINIMAL + "searchers: random", r"e.yaml: searchers: a list, such as \[random\], but got 'random'"),
        ("experiment: e\nmodels: x", r"models: a list, such as \[x\], but got 'x'"),
        (MINIMAL + "seeds: 3", r"seeds: a list, such as \[3\], but got 3"),
        (MINIMAL + "seeds:", r"seeds: a list, such as \[...\], but got nothing"),
        (MINIMAL + "budget: {evaluations: 10}", r"budget.evaluations: a list, such as \[10\], but got 10"),
        (MINIMAL + "budget: 10", "budget: a mapping with keys such as evaluations, minutes, stop_at, task_minutes"),
        ("experiment: e\nmodels: [{use: a, shapes: 1x3}]", "models.0.shapes: a mapping of keys, but got '1x3'"),
        *(
            (
                f"experiment: e\nmodels: [{{use: a, calibration: {{data: {name}}}}}]",
                f"models.0.calibration.data: a mapping, such as {{{hint}: {name}}}, but got '{name}'",
            )
            for name, hint in [("c.npz", "use: npz, path"), ("c.npy", "use: npy, path"), ("d", "use: images, images")]
        ),
        (
            "experiment: e\nmodels: [{use: a, calibration: {data: {use: images}}}]",
            "calibration.data needs 'preprocess'",
        ),
        # the matrix
        (MINIMAL + "matrix: {seeds: [1]}", "matrix.seeds: a path below models, backends or searchers"),
        (MINIMAL + "matrix: {backends.params.threads: []}", r"a list with at least one entry, but got \[\]"),
        (MINIMAL + "matrix: {backends.a.b: [1]}\nbackends: [{use: x, a: q}]", "'a' is 'q' in 'x', not a mapping"),
        (MINIMAL + "matrix: {backends.a.b: [1]}\nbackends: [{use: x, a: }]", "'a' is None in 'x', not a mapping"),
        (MINIMAL + "matrix: {backends.a: [1]}\nbackends: [null]", "are names or mappings, but one is None"),
        (MINIMAL + "matrix: {backends.a: [1]}", "there is no list 'backends' to vary"),
        # the YAML text
        (MINIMAL + "models: [b]", "duplicate key 'models'"),
        (MINIMAL + "x: &a [1]\ny: *a", "aliases .* are not allowed"),
        ("- a\n- b", "an experiment is a mapping of keys, but got list"),
        ("a: [", "not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        (MINIMAL + "? [1]\n: 2", r"not valid YAML: line 3, column 3: a key is a plain name"),
        (MINIMAL + "x: " + "[" * 9999, "not valid YAML: line 3, column 53: nested more than 50 levels deep"),
        (MINIMAL + f"x: {'1' * 5000}", "not valid YAML: Exceeds the limit"),
    ],
)
def test_invalid_experiments_are_rejected(text, expected):
    with pytest.raises(UserError, match=expected):
        parse_experiment(text, "e.yaml")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 0.001), ("-2.5E6", -2.5e6), ("1.e5", 1e5), (".5", 0.5), ("010", 10), ("0o17", 15), ("0xff", 255),
        ("1:30", "1:30"), ("1_000", "1_000"), ("0b1", "0b1"), ("yes", "yes"), ("no", "no"), ("on", "on"),
        ("true", True), ("~", None), ("2026-01-02", "2026-01-02"), ("2020-13-45", "2020-13-45"), ("<<", "<<"),
        ("'1e-3'", "1e-3"),
    ],
)  # fmt: skip
def test_plain_scalars_follow_yaml_1_2_and_survive_a_round_trip(written, value):
    experiment = parse_experiment(MINIMAL + f"searchers: [{{use: random, params: {{rate: {written}}}}}]", "e.yaml")
    read = experiment.searchers[0].params["rate"]
    assert (read, type(read)) == (value, type(value))
    assert parse_experiment(to_yaml(experiment), "again").searchers[0].params["rate"] == value
    assert yaml.safe_load(to_yaml(experiment))["searchers"][0]["params"]["rate"] == value


def test_object_that_occurs_twice_survives_a_round_trip():
    """A program may pass one mapping as calibration data and as data of the metric."""
    data = {"use": "npz", "path": "data.npz"}
    model = {"use": "a.onnx", "calibration": {"data": data}, "evaluator": {"use": "fidelity", "params": {"data": data}}}
    experiment = parse_experiment(dump_yaml({"experiment": "e", "models": [model]}), "e.yaml")
    assert experiment.models[0].evaluator.params["data"] == experiment.models[0].calibration.data == data


def test_tasks_that_would_share_a_folder_are_rejected():
    models = "[{use: m, label: a-b}, {use: m, label: a}]"
    backends = "[{use: x, label: c}, {use: x, label: b-c}]"
    experiment = parse_experiment(f"experiment: e\nmodels: {models}\nbackends: {backends}", "e.yaml")
    with pytest.raises(UserError, match="'a-b-c-int8'; choose other labels"):
        plan_tasks(experiment)


@given(st.text(alphabet="ab:-[]{},?!&*|>'\" \n#%@`0.1e~", max_size=60))
def test_invalid_text_raises_user_error(text):
    with pytest.raises(UserError, match=r"^e\.yaml: "):
        parse_experiment(text, "e.yaml")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hybrid.onnx", "this is an ONNX model"),
        ("odd.yaml", "this is not text"),
        ("none.yaml", "no such file"),
        ("", "this is a folder"),
        ("x" * 300, "cannot be read: File name too long"),
    ],
)
def test_files_that_are_no_experiments_are_rejected(tmp_path, name, message):
    (tmp_path / "hybrid.onnx").write_bytes(b"\x08\x0a\xff")
    (tmp_path / "odd.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError) as caught:
        load_experiment(tmp_path / name)
    assert str(caught.value).startswith(f"{shorten_values(str(tmp_path / name))}: {message}")
    assert "Errno" not in str(caught.value)
