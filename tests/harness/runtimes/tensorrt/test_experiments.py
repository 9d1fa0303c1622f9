"""The experiments for a GPU hold together on a machine that has none."""

import os
from pathlib import Path

import pytest

from harness.config.experiment import Experiment, parse_experiment, plan_tasks
from harness.run.prepare.preflight import check_experiment

FOLDER = Path(__file__).parents[4] / "experiments"


def read(name: str) -> Experiment:
    return parse_experiment((FOLDER / name).read_text(encoding="utf-8"), name, FOLDER)


def test_timing_cache_experiment_covers_all_policies():
    experiment = read("timing_cache_policy.yaml")
    check_experiment(experiment)
    policies = [spec.backend.params["timing_cache"] for spec in plan_tasks(experiment)]
    assert sorted(set(policies)) == ["cold", "frozen", "shared"]
    assert all(policies.count(policy) == 2 for policy in policies), "each model at each"
    assert policies.index("shared") < policies.index("frozen"), "what is frozen has been made before"


@pytest.mark.assets
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
@pytest.mark.parametrize("name", ["classifiers_trt", "detectors_trt", "transformers_trt"])
def test_experiments_cover_batch_sizes_1_8_and_32(name):
    experiment = read(f"{name}.yaml")
    check_experiment(experiment)
    assert {use.params["precision"] for use in experiment.backends} == {"f16"}, "FP16 is the denominator"
    tasks = plan_tasks(experiment)
    assert {precision for task in tasks for precision in task.precisions} == {"int8", "fp8"}
    batches: dict[str, set[int]] = {}
    for model in experiment.models:
        for shape in model.shapes.values():
            batches.setdefault(model.use, set()).add(int(str(shape).partition("x")[0]))
    assert all(sizes == {1, 8, 32} for sizes in batches.values()), batches
