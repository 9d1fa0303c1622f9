"""The experiments that compare searchers ask what their tables are to answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.base.errors import UserError
from harness.config.experiment import Experiment, load_experiment, plan_tasks
from harness.plugins.registry import create_plugin
from harness.run.prepare.preflight import check_experiment

FOLDER = Path(__file__).parents[3] / "experiments"
SEVEN = [
    "resnet18", "encoder6", "deit_tiny", "mobilenet_v1_0.75", "nanodet_m_320", "squeezenet1.1", "yolox_nano",
]  # fmt: skip
PARTS = {"rules", "blocks", "surrogate", "initial", "sharing", "racing", "rebuilds"}


def read(name: str) -> Experiment:
    return load_experiment(FOLDER / f"{name}.yaml")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_has_tasks_of_different_names(path):
    names = [task.name for task in plan_tasks(load_experiment(path))]
    assert names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "static"),
    [
        ("searchers_openvino", {"ort_static"}),
        ("searchers_openvino_bf16", {"ort_static"}),
        ("searchers_onnxruntime", {"ort_static", "ort_static_s8"}),
    ],
)
def test_searcher_experiments_compare_auto_modelopt_and_fixed_rows(name, static):
    experiment = read(name)
    assert [model.name for model in experiment.models] == SEVEN
    assert [searcher.name for searcher in experiment.searchers] == ["modelopt", "modelopt_warm", "auto"]
    assert {"all", "linear", "modelopt_ptq"} | static <= set(experiment.baselines)
    assert {25, 100} <= set(experiment.budget.evaluations)


def test_the_ablation_leaves_out_every_part_and_one_at_a_time():
    whole, *variants = [searcher for searcher in read("ablation_auto").searchers if searcher.use == "auto"]
    left_out = [{*variant.params, *variant.without} for variant in variants]
    assert not whole.params
    assert not whole.without
    assert sorted(map(len, left_out)) == [1] * len(PARTS)
    assert set.union(*left_out) == PARTS


def test_budgets_are_compared_live_over_five_seeds():
    experiment = read("budget_ablation")
    assert {"auto", "random_mutation", "tpe", "evolutionary", "local"} == {each.use for each in experiment.searchers}
    assert len(experiment.seeds) == 5
    assert {10, 25, 50, 100} == set(experiment.budget.evaluations)


def test_transfer_experiment_covers_runtimes_threads_and_models():
    experiment = read("transfer")
    assert {(use.use, use.params["threads"]) for use in experiment.backends} == {
        (runtime, threads) for runtime in ("openvino", "onnxruntime") for threads in (1, 2)
    }
    assert set(experiment.transfer) == {"backends", "models"}
    assert {"resnet18", "resnet50"} <= {model.name for model in experiment.models}


@pytest.mark.assets
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
@pytest.mark.parametrize("name", ["searchers_openvino", "searchers_openvino_bf16", "searchers_onnxruntime"])
def test_experiments_pass_preflight_check(name):
    if name.endswith("_bf16") and "bf16" not in create_plugin("benchmarker", "openvino", {}).describe()["float_params"]:
        with pytest.raises(UserError, match=r"this CPU offers .* but got 'bf16'"):
            check_experiment(read(name))
        return
    assert [remark for remark in check_experiment(read(name)) if "random data is used" not in remark] == []
