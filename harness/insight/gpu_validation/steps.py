"""Steps of the validation: what each needs, and the program that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from harness.base.errors import CandidateError, UserError, install_hint
from harness.graph.qdq.file_checks import FP8_CAPABILITY
from harness.plugins.registry import call_plugin, create_plugin
from harness.runtimes.cuda.device import open_device

CLI = ("-m", "harness.cli.main")
MEASURES = ("-c", "import sys; from harness.insight.gpu_validation.measures import main; sys.exit(main(sys.argv[1:]))")
MODELS: Mapping[str, str] = {"resnet18": "zoo:resnet18", "encoder6": "zoo:encoder6"}
"""Searched models by the name of their steps: a CNN and a transformer."""
EVALUATIONS = 40
TENSORRT_BENCHMARKERS = ("tensorrt", "trtexec", "tensorrt_rtx")
CASES_FOLDER = Path(__file__).parents[3] / "tests" / "recorded"
"""Small models with the verdicts of TensorRT-RTX's compiler; part of a checkout, not of the installed package."""
EXPERIMENT = """experiment: gpu_{name}
models: [{{use: {use!r}, label: {name}, evaluator: {{use: fidelity, params: {{samples: 4}}}}}}]
backends: [tensorrt]
precision: [{precisions}]
initial: [float, all, linear, linear_add, movers]
searchers: [{searchers}]
baselines: [{baselines}]
budget: {{evaluations: [{evaluations}]}}
"""
METHODS: Mapping[str, tuple[str, str]] = {
    "auto": ("auto", "all, linear"),
    "modelopt": ("auto, modelopt", "all, linear, modelopt_ptq"),
}
"""Searchers and baselines of the steps with a search; the second adds to the results of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Step of the validation.

    Attributes:
        needs: Keys of `REQUIREMENTS`; without one of them the step is skipped.
        program: Arguments of Python; the working directory is the folder of the step.
        experiment: Returns the text of `experiment.yaml` in that folder; None: the program reads none.
        results: Results folder of the experiment, relative to that folder; "" without one.
    """

    name: str
    title: str
    needs: tuple[str, ...]
    program: tuple[str, ...]
    experiment: Callable[[], str] | None = None
    results: str = ""


def list_steps() -> tuple[Step, ...]:
    """Return all steps, in the order in which they run."""
    model = next(iter(MODELS.values()))
    conformance = [
        Step(
            name=f"conformance-{use}",
            title=f"contract of the benchmarker {use}, on a small model",
            needs=(use,),
            program=(*MEASURES, "conformance", use),
        )
        for use in TENSORRT_BENCHMARKERS
    ]
    return (
        Step(name="doctor", title="runtimes, devices and versions", needs=(), program=(*CLI, "doctor")),
        Step(
            name="timer",
            title="CUDA events with and without a graph, and their noise floor",
            needs=("gpu",),
            program=(*MEASURES, "timer"),
        ),
        *conformance,
        Step(
            name="trtexec-timing",
            title="the timer against trtexec's own figures, on the same engine",
            needs=("tensorrt", "trtexec"),
            program=(*MEASURES, "trtexec-timing", model),
        ),
        Step(
            name="noise",
            title="A/A floor: one model, rebuilt in fresh processes",
            needs=("tensorrt",),
            program=(*CLI, "noise", model, "--backend", "tensorrt", "--out", "noise"),
        ),
        *(_search_step(method, name) for method in METHODS for name in MODELS),
        Step(
            name="verdicts",
            title="TensorRT's verdicts on small models against those of TensorRT-RTX's compiler",
            needs=("tensorrt", "checkout"),
            program=(*MEASURES, "verdicts"),
        ),
    )


def _search_step(method: str, name: str) -> Step:
    """Return a step with a search; its results are in the folder of the step `auto-NAME`."""
    results = f"../auto-{name}/results"
    return Step(
        name=f"{method}-{name}",
        title=f"search by {METHODS[method][0]} on {name}; baselines {METHODS[method][1]}",
        needs=("tensorrt",) if method == "auto" else ("tensorrt", method),
        program=(*CLI, "run", "experiment.yaml", "--out", results),
        experiment=partial(_write_experiment, method, name),
        results=results,
    )


def _write_experiment(method: str, name: str) -> str:
    searchers, baselines = METHODS[method]
    precisions = "int8, fp8" if open_device()[1].capability >= FP8_CAPABILITY else "int8"
    shown = {"name": name, "use": MODELS[name], "precisions": precisions, "evaluations": EVALUATIONS}
    return EXPERIMENT.format(searchers=searchers, baselines=baselines, **shown)


def find_missing(step: Step) -> str:
    """Return what a step lacks on this machine, with the remedy, as one line; "" if it can run."""
    problems = dict.fromkeys(REQUIREMENTS[need]() for need in step.needs)
    return "; ".join(filter(None, problems))


@cache
def _benchmarker_problem(use: str) -> str:
    try:
        call_plugin(f"benchmarker {use}", lambda: dict(create_plugin("benchmarker", use, {}).describe()))
    except (UserError, CandidateError) as error:
        return " ".join(str(error).split())
    return ""


@cache
def _gpu_problem() -> str:
    try:
        open_device()
    except UserError as error:
        return str(error)
    return ""


def _modelopt_problem() -> str:
    return "" if find_spec("modelopt") else f"ModelOpt is not installed: {install_hint('modelopt')}"


def _checkout_problem() -> str:
    here = (CASES_FOLDER / "compiler_cases.py").is_file()
    return "" if here else "the small models are part of the repository: pip install -e of a checkout"


REQUIREMENTS: Mapping[str, Callable[[], str]] = {
    **{use: partial(_benchmarker_problem, use) for use in TENSORRT_BENCHMARKERS},
    "gpu": _gpu_problem,
    "modelopt": _modelopt_problem,
    "checkout": _checkout_problem,
}
