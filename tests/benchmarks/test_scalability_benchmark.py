"""What many tasks and long searches cost: a report, the start of a run, the searchers' own time, the memory of a run.

Run with `pytest tests/benchmarks/test_scalability_benchmark.py --benchmark-enable -s`; it prints the figures of
docs/explanation/reliability.md. Each is taken in a process of its own. QDQ_TASKS sets the number of tasks of the report
(40), QDQ_EVALUATIONS those of a search (1000) and of a search by one of Optuna's samplers (at most 500 without it).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from large_report import write_experiment

from harness.base.files import read_json, write_json
from harness.graph.builder import GraphBuilder

pytestmark = pytest.mark.slow
TASKS = int(os.environ.get("QDQ_TASKS", "40"))
EVALUATIONS = int(os.environ.get("QDQ_EVALUATIONS", "1000"))
OPTUNA_SAMPLERS = ("RandomSampler", "NSGAIISampler")
HEAD = """
import json, resource, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def figures():
    most_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(json.dumps([time.process_time(), most_mib]), flush=True)
"""
REPORT = """
from harness.report.render import write_report
write_report(folder)
figures()
"""
START = """
import os
from harness.cli.main import main
from harness.results.journal import Journal
def append(self, *_, **__):
    figures()
    os._exit(0)
Journal.append = append
main(["run", str(folder / "many.yaml"), "--out", str(folder / "started")])
"""
RUN = """
from harness.config.experiment import load_experiment
from harness.run.runner import run_experiment
from harness.base.progress import NullProgress
run_experiment(load_experiment(folder / sys.argv[2]), out=folder / "out" / sys.argv[2], observer=NullProgress())
figures()
"""
SEARCH = """
import json, os, sys, time
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # as in a run; waiting threads count too
from importlib.metadata import entry_points
from search.synthetic_problem import SyntheticObjective, common_initial_placements, synthetic_space
name, params, evaluations = sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
(point,) = entry_points(group="qdq.searchers", name=name)
space = synthetic_space(40)
objective, searcher = SyntheticObjective(space, seed=0), point.load()(space, seed=0, **params)
asked, spent_s, known = common_initial_placements(space), 0.0, {}
while len(known) < evaluations and asked:
    told = [objective.observe(placement) for placement in asked]
    started_s = time.process_time()
    for observation in told:
        searcher.tell(known.setdefault(observation.digest, observation))
    asked = searcher.ask(1)
    spent_s += time.process_time() - started_s
    if len(known) in (100, 250, 500, 1000, 2000, 5000, evaluations):
        print(f"{len(known)}: {spent_s:.2f} s", file=sys.stderr)
print(json.dumps([spent_s, 0.0]))
"""


def repeat_tasks(folder: Path, source: Path, models: int) -> None:
    """Write a results folder with the tasks of `m000` in another one for each of many labels."""
    write_experiment(folder / "experiment.yaml", models, len(list(source.glob("m000-*"))), 50)
    for number in range(models):
        for task in source.glob("m000-*"):
            copy = folder / task.name.replace("m000", f"m{number:03}")
            shutil.copytree(task, copy)
            write_json(copy / "task.json", read_json(copy / "task.json") | {"task": copy.name, "model": copy.name[:4]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    builder = GraphBuilder("net", seed=1)
    x = builder.input("x", (1, 3, 8, 8))
    for _ in range(30):
        x = builder.op("Relu", builder.conv(x, 8, 3, pad=1))
    builder.output(builder.op("GlobalAveragePool", x))
    builder.save(folder / "net.onnx")
    return folder


def measure(benchmark: Any, script: str, *args: object) -> tuple[float, float]:
    """Return the processor time in seconds and the peak memory in MiB of a script."""
    command = [sys.executable, "-c", HEAD + script, *map(str, args)]

    def run() -> str:
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    cpu_s, most_mib = json.loads(benchmark.pedantic(run, rounds=1).splitlines()[-1])
    benchmark.extra_info |= {"cpu_s": cpu_s, "most_mib": most_mib}
    return cpu_s, most_mib


def test_a_report_of_many_tasks(benchmark, folder):
    if benchmark.disabled:
        pytest.skip("tests/harness/report writes small ones; enable benchmarks to take the time of a large one")
    write_experiment(folder / "two.yaml", 1, 2, 50)
    command = [sys.executable, "-c", HEAD + RUN, str(folder), "two.yaml"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    results = folder / "many"
    results.mkdir()
    repeat_tasks(results, folder / "out" / "two.yaml", TASKS // 2)
    first_s, most_mib = measure(benchmark, REPORT, results)
    page = (results / "report" / "index.html").stat().st_size
    print(f"\n| report of {TASKS} tasks | {first_s:.0f} s of processor time, {most_mib:.0f} MiB, {page / 1e6:.1f} MB |")


def test_the_start_of_500_tasks(benchmark, folder):
    if benchmark.disabled:
        pytest.skip("enable benchmarks to take the time of a start")
    write_experiment(folder / "many.yaml", 25, 20, 50)
    cpu_s, _ = measure(benchmark, START, folder)
    print(f"\n| 500 tasks, until the first evaluation | {cpu_s:.1f} s of processor time |")


@pytest.mark.parametrize("evaluations", [100, 10_000])
def test_the_memory_of_a_run(benchmark, folder, evaluations):
    if benchmark.disabled:
        pytest.skip("enable benchmarks to take the memory of a long run")
    name = f"run{evaluations}.yaml"
    write_experiment(folder / name, 1, 1, evaluations)
    _, most_mib = measure(benchmark, RUN, folder, name)
    print(f"\n| a run of {evaluations} evaluations a search | {most_mib:.0f} MiB |")


@pytest.mark.parametrize("searcher", ["random", "evolutionary", "auto", "nsga2", "tpe", *OPTUNA_SAMPLERS])
def test_the_time_of_a_searcher(benchmark, searcher):
    if benchmark.disabled:
        pytest.skip("tests/search/test_complexity.py counts; enable benchmarks to take the time")
    name, params = ("optuna", {"sampler": searcher}) if searcher in OPTUNA_SAMPLERS else (searcher, {})
    slow = name in ("optuna", "tpe") and "QDQ_EVALUATIONS" not in os.environ
    evaluations = min(EVALUATIONS, 500) if slow else EVALUATIONS
    spent_s, _ = measure(benchmark, SEARCH, ".", name, json.dumps(params), evaluations)
    print(f"\n| {searcher}, 40 points, {evaluations} evaluations | {spent_s:.1f} s of processor time |")
