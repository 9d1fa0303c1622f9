"""An experiment file is checked before anything runs, and every message says where, what and what else."""

import pytest
import yaml

from harness.errors import UserError
from harness.run.config import load_experiment, parse_experiment, to_yaml
from harness.run.plan import plan

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


def test_matrix_multiplies_a_list_and_labels_each_copy():
    experiment = parse_experiment(
        MINIMAL + "backends: [openvino]\nmatrix: {backends.params.threads: [1, 2], backends.params.precision: [f32]}",
        "e.yaml",
    )
    assert [b.params for b in experiment.backends] == [
        {"threads": 1, "precision": "f32"},
        {"threads": 2, "precision": "f32"},
    ]
    assert [cell.name for cell in plan(experiment)] == [
        "resnet18-openvino-threads-1-precision-f32-int8",
        "resnet18-openvino-threads-2-precision-f32-int8",
    ]


def test_plan_runs_every_searcher_at_the_first_seed_before_the_second():
    experiment = parse_experiment(MINIMAL + "searchers: [random, tpe]\nseeds: [7, 8]", "e.yaml")
    assert [run.name for run in plan(experiment)[0].runs] == ["random-7", "tpe-7", "random-8", "tpe-8"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("experiment: e\nmodel: [a]", "e.yaml: model: unknown key; did you mean 'models'?"),
        (MINIMAL + "budget: {evaluation: [3]}", "budget.evaluation: unknown key; did you mean 'evaluations'?"),
        (MINIMAL + "models: [b]", "duplicate key 'models'"),
        ("experiment: e\nmodels: []", "models: a list here needs at least one entry, but got []"),
        (MINIMAL + "seeds: [x]", "seeds.0: Input should be a valid integer, but got 'x'"),
        (MINIMAL + "precision: [int4]", "precision.0: Input should be 'int8' or 'fp8', but got 'int4'"),
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
        (
            "experiment: e\nmodels: [{use: a, calibration: {data: {use: images}}}]",
            "calibration.data needs 'preprocess'",
        ),
    ],
)
def test_mistakes_are_named(text, expected):
    assert expected in refused(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml: cannot be read"):
        load_experiment(tmp_path / "none.yaml")


def test_resolved_experiment_writes_every_default():
    resolved = yaml.safe_load(to_yaml(parse_experiment(MINIMAL, "e.yaml")))
    assert resolved["confirmation"]["builds"] == 5
    assert resolved["sampling"]["target"] == 0.01
