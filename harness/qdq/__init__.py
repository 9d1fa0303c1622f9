"""Python interface of qdq-bench, installed as the package `qdq`; docs/reference/python.md describes it.

Modules that do the work are imported by the functions, so that `import qdq` takes no time.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.base.errors import UserError, without_inner_errors

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from harness.base.progress import Observer
    from harness.results.folder import Results
    from harness.ship.placements import InsertedModel

__all__ = ["RunResult", "TunedFile", "UserError", "autotune", "insert", "load_result"]

Plugin = str | Mapping[str, Any] | type
"""A name, `{"use": NAME, "params": {...}}`, or a class of this program."""
Samples = Any
"""An array, a mapping of input names to arrays, an iterable of either, a file, a folder of files, or a data mapping of
an experiment. The arrays of an iterable are batches, whose samples may differ in length."""


@without_inner_errors
def autotune(
    model: Any,
    *,
    calibration: Samples | None = None,
    metric: Callable[..., Any] | Plugin | None = None,
    test: tuple[Samples, Any] | None = None,
    max_drop: float | str | None = None,
    backend: Plugin = "openvino",
    precision: str = "int8",
    searcher: Plugin | Sequence[Plugin] = "auto",
    seed: int | Sequence[int] = 0,
    evaluations: int | None = None,
    example_inputs: Any = None,
    preprocess: Plugin | None = None,
    shapes: Mapping[str, str] | None = None,
    dims: Mapping[str, int] | None = None,
    out: Path | str | None = None,
    progress: bool = True,
    accept_changes: bool = False,
    **keys: Any,
) -> RunResult:
    """Find the fastest placement of Q/DQ pairs within a bound on accuracy, as `qdq run` does.

    The same call continues an interrupted run. Ctrl-C, or the stop button of a notebook, returns the results so far.

    Args:
        model: ONNX file, `zoo:NAME`, serialized ONNX, `onnx.ModelProto`, or `torch.nn.Module`.
        calibration: Calibration data; None: random data, for which accuracy is meaningless.
        metric: With `test`, a function `(outputs, labels)` or the name of an evaluator ("top1"). Without, a function
            `(run)`, where `run` takes inputs by name and returns outputs by name, an object of the contract
            `harness.plugins.api.Evaluator`, or `{"use": ..., "params": {...}}`. Functions return a number, more is
            better; with `test` also one for each sample.
        test: Inputs and their labels, one row per sample. Searches use one half; reported figures come from the other.
        max_drop: Largest loss of the metric in points, hundredths of it, or as a percentage of the float model's metric
            ("1%"); None: no bound.
        backend: Runtime to measure on.
        precision: "int8", "fp8", "fp8e5m2" or "mixed".
        searcher: Search method, or several to be compared.
        seed: Seed of the searches, or several.
        evaluations: Maximum number of placements that each search measures; default 50. It stops earlier if no further
            gain is likely.
        example_inputs: Inputs of one call of a PyTorch module.
        preprocess: Preprocessing of images; needed if data are images.
        shapes: Shapes of inputs with dynamic axes, such as `{"images": "1x3x640x640"}`.
        dims: Sizes of dynamic axes by symbol, such as `{"time": 128}`.
        out: Results folder; default `results/NAME` of the file, `results/autotune` for an object.
        progress: Show the progress on standard error, or in the notebook.
        accept_changes: Archive the results of a run with other settings in this folder, and start over.
        keys: Further keys of an experiment file, such as `confirmation` or `initial`.

    Raises:
        UserError: An argument cannot be used, or a searcher failed; in the latter case the report is written.
    """
    from harness.base.files import explain_write_errors
    from harness.base.progress import NullProgress
    from harness.base.terminal_progress import TerminalProgress
    from harness.compat import autotune_experiment as config
    from harness.results.ownership import INPUTS_FOLDER
    from harness.results.termination import SearcherFailures
    from harness.run.prepare.preflight import check_experiment
    from harness.run.prepare.program_objects import model_mapping, plugin_mapping
    from harness.run.prepare.study_task import model_label
    from harness.run.runner import run_experiment
    from harness.ship.results_bundle import ship_answer

    config.check_argument_names(keys, inspect.signature(autotune).parameters)
    name = model_label(str(model)) if isinstance(model, str | Path) else "autotune"
    folder = Path("results", name) if out is None else Path(out)
    objective = {} if max_drop is None else config.drop_objective(max_drop)
    if metric is None and (max_drop is not None or test is not None):
        name_given = "test" if max_drop is None else "max_drop"
        raise UserError(f"{name_given}: needs a metric, for instance metric='top1', test=(inputs, labels)")
    with explain_write_errors(folder):
        described = model_mapping(
            model,
            Path(os.path.relpath(folder / INPUTS_FOLDER)),  # results have no absolute paths
            calibration=calibration,
            metric=metric,
            test=test,
            preprocess=preprocess,
            example_inputs=example_inputs,
            sizes={"shapes": shapes, "dims": dims},
        )
    if max_drop is not None:
        halves = isinstance(described.get("evaluator", {}).get("params", {}).get("data"), dict)
        keys = {"objective": {**objective, "halves": halves}, **keys}
    searchers: Sequence[Any] = searcher if isinstance(searcher, list | tuple) else [searcher]
    settings = {
        "backends": [plugin_mapping("backend", backend)],
        "precision": [precision],
        "searchers": [plugin_mapping("searcher", each) for each in searchers],
        "seeds": list(seed) if isinstance(seed, Iterable) else [seed],
        "budget": config.make_budget(evaluations),
    }
    arguments = {} if "budget" in keys else {"budget.evaluations": "evaluations"}
    arguments |= {"precision": "precision", "seeds": "seed"}
    experiment = config.autotune_experiment(described, "qdq.autotune", arguments, **{**settings, **keys})
    with TerminalProgress() if progress else nullcontext(NullProgress()) as observer:
        for remark in check_experiment(experiment, None if accept_changes else folder):
            observer.say(remark)
        try:
            run_experiment(
                experiment,
                out=folder,
                observer=observer,
                accept_changes=accept_changes,
                answers=lambda found: observer.say(ship_answer(found, folder, observer)),
            )
        except KeyboardInterrupt:
            observer.say(f"interrupted; {folder} has the results so far, and the same call continues the run")
        except SearcherFailures:
            _write_report(folder, observer)
            raise
        else:
            _write_report(folder, observer)
    return load_result(folder)


@without_inner_errors
def insert(
    model: Any,
    out: Path | str,
    *,
    placement: Path | str = "linear",
    calibration: Samples | None = None,
    backend: Plugin = "openvino",
    precision: str = "int8",
    run: bool = True,
    **described: Any,
) -> InsertedModel:
    """Write a model with the Q/DQ pairs of a fixed or a stored placement, without a search; see `qdq insert`.

    The file is run in its runtime, and `check` of the result has the comparison with what the file describes. A file
    that is not usable (`check.is_usable`) is at `path`, which is NAME.wrong.onnx, and an older file `out` is removed.

    Args:
        model: See `autotune`.
        out: File to write.
        placement: Name of a fixed placement, a folder to deploy, or a Q/DQ file.
        calibration: See `autotune`.
        backend: Runtime whose dialect of Q/DQ pairs is written; its device may be absent.
        precision: Precision of quantized values.
        run: Whether the file is run, if its runtime is installed.
        described: Further keys of the model in an experiment file, such as `shapes`; `example_inputs` of a module.

    Raises:
        UserError: An argument cannot be used, or the file cannot be written.
    """
    from tempfile import TemporaryDirectory

    from pydantic import ValidationError

    from harness.base.progress import NullProgress
    from harness.config.sections import PluginSpec
    from harness.config.yaml_loader import to_user_error
    from harness.run.prepare.program_objects import model_mapping, plugin_mapping
    from harness.ship.placements import insert_placement

    example_inputs = described.pop("example_inputs", None)
    with TemporaryDirectory(prefix="qdq-insert-") as scratch:
        entry = model_mapping(model, Path(scratch), calibration=calibration, example_inputs=example_inputs)
        try:
            runtime = PluginSpec.model_validate(plugin_mapping("backend", backend))
        except ValidationError as error:
            raise to_user_error(PluginSpec, "backend", error) from None
        return insert_placement(
            entry.pop("use"), str(placement), Path(out), NullProgress(), backend=runtime, run=run, precision=precision,
            **entry, **described,
        )  # fmt: skip


def load_result(folder: Path | str) -> RunResult:
    """Return the result in the folder of a run, finished or not, of `autotune` or of `qdq run`.

    The folder is read when a figure is first used, which raises `UserError` if it has no results.
    """
    return RunResult(Path(folder))


@dataclass(frozen=True)
class TunedFile:
    """Model file of a result.

    Attributes:
        path: ONNX file, the bytes that were timed and scored.
        method: Method that chose it; "float" for the float model.
        speedup: Speedup over the float model with its 95 % interval: value, low, high.
        drop: Loss of the metric; None without a metric.
    """

    path: Path
    method: str
    speedup: tuple[float, float, float]
    drop: float | None

    @without_inner_errors
    def save(self, path: Path | str) -> Path:
        """Copy the model with its external data to `path`, whose folder is created, and return the path.

        Raises:
            UserError: The model is missing, or `path` cannot be written.
        """
        from harness.graph.io.files import copy_model

        if not self.path.exists():
            raise UserError(f"{self.path}: no such file; the same call of autotune, or qdq run, writes it again")
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            return copy_model(self.path, target.parent, target.name)
        except OSError as error:
            raise UserError(f"{target}: cannot be written ({error})") from error


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        folder: Results folder, which the commands `qdq report`, `verify` and `explain` take.
    """

    folder: Path

    def __repr__(self) -> str:
        if self.answers or self.complete:
            return "\n".join(self.answers) or f"{self.folder}: no file may be shipped; table() has the reasons"
        early = "" if self.ship is None else f"{self.best.path}: {self.best.speedup[0]:.2f}x so far; "
        return f"{early}{self.folder}: not finished; the same call continues it"

    @cached_property
    def _results(self) -> Results:
        from harness.results.folder import load

        return load(self.folder)

    @cached_property
    def _main(self) -> pd.DataFrame:
        from harness.report.frames import main_frame

        return main_frame(self._results)

    @property
    @without_inner_errors
    def complete(self) -> bool:
        """Return whether nothing of the run is missing."""
        return self._results.complete

    @cached_property
    @without_inner_errors
    def answers(self) -> list[str]:
        """Return one line per task: the file to deploy with speedup and loss, or why to keep the float model."""
        from harness.report.next_steps import describe_answers

        return list(describe_answers(self._results, self._main))

    @property
    @without_inner_errors
    def best(self) -> TunedFile:
        """Return the fastest file that may be shipped; the float model if no file is faster within the bound.

        For an interrupted run this is the file that was confirmed during the search.

        Raises:
            UserError: No file is confirmed yet, or the runtime computes the float model wrongly.
        """
        from harness.report.next_steps import answer_row
        from harness.results.deploy_folder import read_bundle
        from harness.results.task_files import exported

        for task in self._results.tasks:
            if row := answer_row(task, self._main):
                drop = row["drop"]
                return TunedFile(
                    path=exported(task, task.rows[row["row"]]),
                    method=row["method"],
                    speedup=(row["speedup"], row["speedup_low"], row["speedup_high"]),
                    drop=None if drop is None or drop != drop else float(drop),
                )
        if self.ship is not None:
            facts = read_bundle(self.ship)
            speedup, low, high = facts["speedup"]
            return TunedFile(
                path=self.ship / facts["file"], method=facts["method"], speedup=(speedup, low, high), drop=None
            )
        if self.complete:
            raise UserError("\n".join([f"{self.folder}: no file may be deployed", *self.answers]))
        raise UserError(f"{self.folder}: no file is confirmed yet; the same call continues the run")

    @property
    def ship(self) -> Path | None:
        """Return the folder to deploy, the first by name if there are several, or None if there is none."""
        from harness.results.deploy_folder import SHIP_FOLDER

        return next(iter(sorted((self.folder / SHIP_FOLDER).glob("*"))), None)

    @without_inner_errors
    def table(self) -> pd.DataFrame:
        """Return a row for each method with its confirmed figures, unrounded, as in the file `main.csv` of a report."""
        return self._main

    @without_inner_errors
    def plot(self, over: Literal["evaluations", "minutes"] = "evaluations") -> Figure:
        """Return a figure with the speedup of each search's incumbent, and the confirmed speedup at each budget.

        Raises:
            UserError: No search has started.
        """
        from harness.report.frames import curve_frame
        from harness.report.plots.charts import draw_chart, speedup_chart
        from harness.report.tables.searchers import budget_frame

        for task in self._results.tasks:
            curves, budgets = curve_frame([task]), budget_frame(self._results)
            if len(curves):
                own = budgets[budgets["task"] == task.name] if over == "evaluations" else None
                return draw_chart(speedup_chart(curves, over, own), task.name)
        raise UserError(f"{self.folder}: no search has started; the same call continues the run")


def _write_report(folder: Path, observer: Observer) -> None:
    """Write the report, unless it is up to date, and the folder to deploy."""
    from harness.report.frames import main_frame
    from harness.report.render import current_report, write_report
    from harness.ship.results_bundle import ship_results

    results, _ = current_report(folder) or write_report(folder, observer=observer)
    ship_results(results, main_frame(results), observer)
