"""An experiment file is checked before anything runs, and every message says where, what and what else."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from harness.config.experiment import load_experiment, parse_experiment, to_yaml
from harness.config.plan import plan_tasks

MINIMAL = "experiment: e\nmodels: [zoo:resnet18]\n"


def refused(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_experiment(text, "e.yaml")
    return str(caught.value)


def test_a_bare_name_is_a_plug_in_without_parameters():
    experiment = parse_experiment(MINIMAL + "searchers: [random, {use: tpe, params: {n: 3}, label: mine}]", "e.yaml")
    assert [(s.name, s.use, s.params) for s in experiment.searchers] == [
        ("random", "random", {}),
        ("mine", "tpe", {"n": 3}),
    ]


def test_resolved_experiment_reads_back_as_itself():
    experiment = parse_experiment(MINIMAL + "budget: {evaluations: [5, 10], minutes: 2.5}", "e.yaml")
    assert parse_experiment(to_yaml(experiment), "again") == experiment


def test_a_shape_may_be_a_list_of_sizes():
    for shape in ("1x3x8x8", "[1, 3, 8, 8]"):
        experiment = parse_experiment(f"experiment: e\nmodels: [{{use: m.onnx, shapes: {{x: {shape}}}}}]", "e.yaml")
        assert experiment.models[0].shapes == {"x": "1x3x8x8"}


def test_matrix_multiplies_a_list_and_labels_each_copy():
    experiment = parse_experiment(
        MINIMAL + "backends: [openvino]\nmatrix: {backends.params.threads: [1, 2], backends.params.precision: [f32]}",
        "e.yaml",
    )
    assert [b.params for b in experiment.backends] == [
        {"threads": 1, "precision": "f32"},
        {"threads": 2, "precision": "f32"},
    ]
    assert [cell.name for cell in plan_tasks(experiment)] == [
        "resnet18-openvino-threads-1-precision-f32-int8",
        "resnet18-openvino-threads-2-precision-f32-int8",
    ]


def test_plan_runs_every_searcher_at_the_first_seed_before_the_second():
    experiment = parse_experiment(MINIMAL + "searchers: [random, tpe]\nseeds: [7, 8]", "e.yaml")
    assert [run.name for run in plan_tasks(experiment)[0].runs] == ["random-7", "tpe-7", "random-8", "tpe-8"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("experiment: e\nmodel: [a]", "e.yaml: model: unknown key; did you mean 'models'?"),
        (MINIMAL + "evaluations: [3]", "evaluations: unknown key; it belongs below budget (look at the indentation)"),
        (
            MINIMAL + "backends: [{use: openvino, threads: 2}]",
            "backends.0.threads: unknown key; a setting of the plug-in stands below params: {params: {threads: ...}}",
        ),
        (MINIMAL + "backends: [{use: openvino, precision: f32}]", "stands below params: {params: {precision: ...}}"),
        (MINIMAL + f"{'k' * 1000}: 1", f"e.yaml: {'k' * 200}...: unknown key"),
        (MINIMAL + "sharing: patern", "sharing: Input should be 'pattern' or 'region', but got 'patern'; did you mean"),
        (MINIMAL + f"seeds: [{', '.join('abcdefghijklmnopqrstuvwxyz')}]", "\nand 6 more"),
        (MINIMAL + f"seeds: [{'x' * 1000}]", "'" + "x" * 199 + "..."),
        (MINIMAL + "budget: {evaluation: [3]}", "budget.evaluation: unknown key; did you mean 'evaluations'?"),
        (MINIMAL + "models: [b]", "duplicate key 'models'"),
        ("experiment: e\nmodels: []", "models: a list here needs at least one entry, but got []"),
        (MINIMAL + "seeds: [x]", "seeds.0: Input should be a valid integer, but got 'x'"),
        (
            MINIMAL + "precision: [int4]",
            "precision.0: Input should be 'int8', 'fp8', 'fp8e5m2' or 'mixed', but got 'int4'",
        ),
        (MINIMAL + "budget: {evaluations: [0]}", "budget.evaluations.0: Input should be greater than or equal to 1"),
        ("experiment: e", "models: this key is required"),
        ("experiment: ../up\nmodels: [a]", "'../up' is no folder name"),
        ("experiment: e\nmodels: [a/m.onnx, b/m.onnx]", "m appears twice; tell them apart by 'label'"),
        (MINIMAL + "x: &a [1]\ny: *a", "aliases (*name) are not allowed here"),
        ("- a\n- b", "an experiment is a mapping of keys, but got list"),
        ("a: [", "not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        (MINIMAL + "matrix: {seeds: [1]}", "matrix.seeds: a path below models, backends or searchers"),
        (MINIMAL + "matrix: {backends.params.threads: []}", "a list with at least one entry, but got []"),
        (MINIMAL + "seeds: [3, 4, 3]", "e.yaml: seeds: 3 appears twice"),
        (MINIMAL + "initial: [all, all]", "initial: all appears twice; tell them apart by 'label'"),
        (MINIMAL + "initial: [linaer]", "initial: no start is called 'linaer'; did you mean 'linear'"),
        (MINIMAL + "initial: [import]", "'import' needs a file: {use: import, params: {path: ...}}"),
        (MINIMAL + "initial: [{use: linear, params: {path: a}}]", "initial: 'linear' has no parameter 'path'"),
        (MINIMAL + "initial: [{use: import, params: {path: 3}}]", "'import': path is the name of a file, but got 3"),
        (
            MINIMAL + "initial: [{use: pattern_cache, params: {path: a, limit: 99}}]",
            "'pattern_cache': limit is 1 to 32, but got 99",
        ),
        (MINIMAL + "initial: [{use: linear, label: mine}]", "'linear' keeps its own name, but got the label 'mine'"),
        (
            MINIMAL + "initial: [{use: import, params: {path: a}, label: linear}]",
            "'import' keeps its own name, but got the label 'linear'",
        ),
        (
            MINIMAL + "initial: [{use: import, params: {path: a}, label: float-bf16}]",
            "the label 'float-bf16' is what tables call another row; take another label",
        ),
        (
            MINIMAL + "initial: [{use: pattern_cache, params: {path: a, limit: 2}, label: c}, "
            "{use: import, params: {path: b}, label: c-2}]",
            "the label 'c-2' is what tables call another row; take another label",
        ),
        (MINIMAL + "initial: [{use: import, params: {path: a}, label: ../b}]", "initial: '../b' is no folder name"),
        (MINIMAL + "baselines: [float]", "baselines: no baseline is called 'float'"),
        (MINIMAL + "baselines: [mine]", "baselines: no baseline is called 'mine'"),
        (
            MINIMAL + "initial: [{use: pattern_cache, params: {path: a, limit: 9}}]\nbudget: {evaluations: [9]}",
            "initial has 9 starts, which count",
        ),
        (MINIMAL + "baselines: [all, all]", "baselines: 'all' appears twice"),
        (MINIMAL + "precision: [int8, int8]", "precision: 'int8' appears twice"),
        (MINIMAL + "budget: {evaluations: [9, 9]}", "budget.evaluations: 9 appears twice"),
        (MINIMAL + "budget: {evaluations: [5]}", "initial has 7 starts, which count: ask for more, but got 5"),
        (MINIMAL + "searchers: [{use: random, label: a/b}]", "searchers: 'a/b' is no folder name; use at most 100"),
        (MINIMAL + "backends: [{use: openvino, label: ../x}]", "backends: '../x' is no folder name"),
        (f"experiment: {'e' * 101}\nmodels: [a]", "is no folder name; use at most 100 letters, digits"),
        (MINIMAL + "searchers: random", "e.yaml: searchers: a list, such as [random], but got 'random'"),
        ("experiment: e\nmodels: x", "models: a list, such as [x], but got 'x'"),
        (MINIMAL + "seeds: 3", "seeds: a list, such as [3], but got 3"),
        (MINIMAL + "seeds:", "seeds: a list, such as [...], but got nothing"),
        (MINIMAL + "budget: {evaluations: 10}", "budget.evaluations: a list, such as [10], but got 10"),
        (MINIMAL + "budget: 10", "budget: a mapping with keys such as evaluations, minutes, but got 10"),
        ("experiment: e\nmodels: [{use: a, shapes: 1x3}]", "models.0.shapes: a mapping of keys, but got '1x3'"),
        *(
            (
                f"experiment: e\nmodels: [{{use: a, calibration: {{data: {name}}}}}]",
                f"models.0.calibration.data: a mapping, such as {{{said}: {name}}}, but got '{name}'",
            )
            for name, said in [("c.npz", "use: npz, path"), ("c.npy", "use: npy, path"), ("d", "use: images, images")]
        ),
        (MINIMAL + "matrix: {backends.a.b: [1]}\nbackends: [{use: x, a: q}]", "'a' is 'q' in 'x', not a mapping"),
        (MINIMAL + "matrix: {backends.a.b: [1]}\nbackends: [{use: x, a: }]", "'a' is None in 'x', not a mapping"),
        (MINIMAL + "matrix: {backends.a: [1]}\nbackends: [null]", "are names or mappings, but one is None"),
        (MINIMAL + "matrix: {backends.a: [1]}", "there is no list 'backends' to vary"),
        (MINIMAL + "? [1]\n: 2", "e.yaml: not valid YAML: line 3, column 3: a key is a plain name, but got [1]"),
        (MINIMAL + "x: " + "[" * 9999, "e.yaml: not valid YAML: line 3, column 53: nested more than 50 levels deep"),
        (MINIMAL + "x: 2020-13-45", "e.yaml: not valid YAML: month must be in 1..12"),
        (
            "experiment: e\nmodels: [{use: a, calibration: {data: {use: images}}}]",
            "calibration.data needs 'preprocess'",
        ),
    ],
)
def test_mistakes_are_named(text, expected):
    assert expected in refused(text)


@pytest.mark.parametrize(
    ("written", "meant"), [("1e-3", "1.0e-3"), ("-2.5E6", "-2.5e+6"), ("1.e5", "1.0e+5"), ("2e+0", "2.0e+0")]
)
def test_numbers_that_yaml_takes_for_text_are_refused_with_what_to_write(written, meant):
    text = MINIMAL + "searchers: [{use: random, params: {rate: NUMBER}}]"
    assert refused(text.replace("NUMBER", written)).endswith(f"{written} is text to YAML, no number; quote it, "
                                                             f"or write {meant}")  # fmt: skip
    value = parse_experiment(text.replace("NUMBER", meant), "e.yaml").searchers[0].params["rate"]
    assert value == float(written)
    assert parse_experiment(text.replace("NUMBER", f"'{written}'"), "e.yaml").searchers[0].params["rate"] == written


def test_cells_that_would_share_a_folder_are_refused():
    models = "[{use: m, label: a-b}, {use: m, label: a}]"
    backends = "[{use: x, label: c}, {use: x, label: b-c}]"
    experiment = parse_experiment(f"experiment: e\nmodels: {models}\nbackends: {backends}", "e.yaml")
    with pytest.raises(UserError, match="two cells would be called 'a-b-c-int8'; choose other labels"):
        plan_tasks(experiment)


def test_matrix_labels_of_long_values_are_their_place_in_the_list():
    experiment = parse_experiment(MINIMAL + "matrix: {models.calibration: [{samples: 3}, {samples: 4}]}", "e.yaml")
    assert [(m.name, m.calibration.samples) for m in experiment.models] == [
        ("resnet18-calibration-0", 3),
        ("resnet18-calibration-1", 4),
    ]


@given(st.text(alphabet="ab:-[]{},?!&*|>'\" \n#%@`0.1e~", max_size=60))
def test_whatever_the_text_there_is_an_experiment_or_a_message(text):
    with pytest.raises(UserError, match=r"^e\.yaml: "):
        parse_experiment(text, "e.yaml")


def test_what_is_no_experiment_file_is_named(tmp_path):
    (tmp_path / "hybrid.onnx").write_bytes(b"\x08\x0a\xff")
    (tmp_path / "odd.yaml").write_bytes(b"\xff\xfe")
    for name, said in {
        "hybrid.onnx": "this is a model by its name, not an experiment file",
        "odd.yaml": "this is no text, so not an experiment file",
        "none.yaml": f"no such file ({tmp_path / 'none.yaml'})",
        "": "this is a folder; name the experiment file in it",
        "x" * 300: "cannot be read: File name too long",
    }.items():
        with pytest.raises(UserError) as caught:
            load_experiment(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: {said}")
        assert "Errno" not in str(caught.value)


def test_resolved_experiment_writes_every_default():
    resolved = yaml.safe_load(to_yaml(parse_experiment(MINIMAL, "e.yaml")))
    assert resolved["confirmation"]["builds"] == 5
    assert resolved["sampling"]["target"] == 0.01


@pytest.mark.parametrize("cold", ["[]", "none"])
def test_a_cold_start_has_no_seeds_and_one_evaluation_is_enough(cold):
    experiment = parse_experiment(MINIMAL + f"initial: {cold}\nbudget: {{evaluations: [1]}}", "e.yaml")
    assert experiment.initial == ()
    assert parse_experiment(to_yaml(experiment), "again") == experiment


def test_an_imported_model_can_be_start_and_baseline():
    text = MINIMAL + "initial: [float, {use: import, params: {path: q.onnx}, label: mine}]\nbaselines: [mine, movers]"
    experiment = parse_experiment(text, "e.yaml")
    assert [start.name for start in experiment.initial] == ["float", "mine"]
    assert experiment.baselines == ("mine", "movers")
    assert parse_experiment(to_yaml(experiment), "again") == experiment
