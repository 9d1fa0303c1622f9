"""Command line: `python -m harness.compat.modelopt_autotune`, and the function behind `qdq autotune`."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.base.errors import UserError
from harness.base.paths import WAIT_VARIABLE, resolve_path
from harness.base.progress import Observer
from harness.base.terminal_progress import TerminalProgress
from harness.compat.modelopt_autotune.benchmark import backend_spec, init_benchmark_instance
from harness.compat.modelopt_autotune.region_pattern import untyped_linear_inputs
from harness.compat.modelopt_autotune.region_search import get_node_filter_list
from harness.compat.modelopt_autotune.session import calibration_batches
from harness.compat.modelopt_autotune.settings import (
    MODE_PRESETS,
    AutotunerError,
    Config,
    check_counts,
    get_parser,
    ineffective_flags,
    parse_arguments,
    select_mode_preset,
)
from harness.compat.modelopt_autotune.workflows import AutotuneRun
from harness.config.sections import Limits, ModelSpec
from harness.config.yaml_loader import parse_params
from harness.graph.load import save_to_folder
from harness.graph.passes.static_shapes import parse_dims, parse_named_shapes
from harness.graph.qdq.import_placement import import_placement
from harness.graph.rules.dialects import TENSORRT
from harness.measure.records import MAIN_BENCHMARKER
from harness.plugins.registry import find_entry_point
from harness.results.journal import CHANGED_RUN_ADVICE, FingerprintMismatch
from harness.run.prepare.float_baseline import read_runtime, select_float_baseline
from harness.run.prepare.model_loader import open_model
from harness.workers.sandbox import open_engines

__all__ = ["MODE_PRESETS", "apply_mode_presets", "autotune", "get_parser", "main"]

RESULTS_FOLDER_MARKERS = ("experiment.yaml", "task.json")  # files of a results folder of `qdq run`, and of a task


def main() -> int:
    """Run the command line of this process; return 2 after a mistake and 130 after Ctrl-C."""
    try:
        with TerminalProgress() as terminal:
            autotune(sys.argv[1:], "python -m harness.compat.modelopt_autotune", terminal)
    except UserError as error:
        print(f"autotune: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def apply_mode_presets(options: argparse.Namespace) -> None:
    """Set `num_schemes`, `warmup_runs` and `timing_runs` of a parsed command line, see `select_mode_preset`."""
    preset = select_mode_preset(options)
    options.num_schemes = preset["schemes_per_region"]
    options.warmup_runs, options.timing_runs = preset["warmup_runs"], preset["timing_runs"]


def autotune(given: Sequence[str], prog: str, observer: Observer) -> None:
    """Run a command line of ModelOpt's procedure and write its files; `prog` names the program in messages."""
    options = parse_arguments(given, prog)
    if options.wait is not None:
        os.environ[WAIT_VARIABLE] = f"{options.wait}"
    check_counts(options)
    if options.at or options.at_objective:
        raise AutotunerError("--at, --at_objective: ModelOpt's procedure times one shape; leave out its flags")
    if options.start or options.baseline:
        raise AutotunerError("--start, --baseline: not in ModelOpt's procedure, which has --qdq_baseline FILE")
    if options.json:
        raise AutotunerError("--json: ModelOpt's procedure prints no table; leave out its flags")
    preset = select_mode_preset(options)
    fresh = not Path(options.output_dir).exists()
    if options.searcher is not None:
        find_entry_point("searcher", options.searcher)
    run = AutotuneRun(
        output_dir=_make_output_folder(options.output_dir),
        schemes_per_region=preset["schemes_per_region"],
        pattern_cache_file=options.pattern_cache,
        state_file=options.state_file,
        qdq_baseline=None if options.qdq_baseline is None else resolve_path(options.qdq_baseline),
        node_filters=tuple(get_node_filter_list(options.node_filter_list) or ()),
        config=Config(
            **{
                **{name: value for name, value in vars(options).items() if name in Config.__dataclass_fields__},
                "default_quant_type": options.quant_type,
                "searcher": options.searcher or "random_mutation",
            }
        ),
        whole=options.searcher is not None,
        ship=True,
        max_evals=options.max_evals,
        observer=observer,
    )
    try:
        with _forward_logs(options.verbose, observer):
            _run_command(options, preset, run)
    except UserError as error:
        if fresh:
            with suppress(OSError):  # the folder is not empty
                run.output_dir.rmdir()
        if not isinstance(error, FingerprintMismatch):
            raise
        advice = "use another --output_dir, or move the existing files away"
        raise UserError(str(error).replace(CHANGED_RUN_ADVICE, advice)) from error
    except KeyboardInterrupt:
        text = f"what was measured is in {run.state}" if run.state.exists() else "nothing was measured yet"
        observer.say(f"interrupted; {text}: run the same command again to resume")
        raise


def _run_command(options: argparse.Namespace, preset: dict[str, int], run: AutotuneRun) -> None:
    libraries = options.plugin_libraries or ()
    backend = backend_spec(
        options.backend,
        parse_params(options.param),
        use_trtexec=options.use_trtexec,
        plugin_libraries=[str(resolve_path(file).resolve()) for file in libraries],
        timing_cache_file=options.timing_cache,
        trtexec_args=options.trtexec_benchmark_args,
    )
    runtime = read_runtime(backend)
    dialect, device = runtime.dialect.name, runtime.facts.get("device", "an unknown device")
    target = f"{backend.use} on {device}, in the dialect {dialect} of Q/DQ pairs"
    if dialect != TENSORRT.name:
        target += "; TensorRT needs other pairs: for a file for TensorRT, use --backend tensorrt"
    say, shapes = run.observer.say, parse_named_shapes("--shape", options.shape or ())
    say(f"searched for {target}")
    with TemporaryDirectory(prefix="qdq-autotune-") as scratch:
        spec = ModelSpec(use=options.onnx_path, label="model", shapes=shapes, dims=parse_dims(options.dim or ()))
        model = open_model(spec, Path(scratch))
        for idle in ineffective_flags(options, backend.params, typed=not untyped_linear_inputs(model)):
            say(f"without effect: {idle}")
        # Files are checked before anything is timed.
        calibration_batches(model, run.config)
        if run.qdq_baseline is not None:
            import_placement(run.qdq_baseline, model)
        float_file, open_worker = save_to_folder(model, Path(scratch) / "float"), partial(open_engines, limits=Limits())
        try:
            baseline = select_float_baseline(backend, float_file, run.output_dir, open_worker, run.observer)
        finally:
            shutil.rmtree(run.output_dir / "work", ignore_errors=True)
        use = baseline[MAIN_BENCHMARKER]
        benchmark = init_benchmark_instance(
            backend=use.use,
            params=use.params,
            warmup_runs=preset["warmup_runs"],
            timing_runs=preset["timing_runs"],
        )
        try:
            run.run(model)
            if model.origin is None and shapes:  # otherwise the summary says so
                fixed = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
                say(f"The models written take these shapes alone: {fixed}")
            say(f"Made for {target}")
        finally:
            benchmark.close()


@contextmanager
def _forward_logs(verbose: bool, observer: Observer) -> Iterator[None]:
    """Show the log messages of the package during a run if it is verbose."""
    if not verbose:
        yield
        return
    logger, handler = logging.getLogger("harness"), ObserverHandler(observer)
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class ObserverHandler(logging.Handler):
    """Handler that gives log messages to an observer, which prints them next to its progress."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        self._observer.say(f"{record.name}: {record.getMessage()}")


def _make_output_folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise UserError(f"--output_dir {path}: is a file, not a folder; choose another folder")
    if marker := next((name for name in RESULTS_FOLDER_MARKERS if (path / name).exists()), None):
        raise UserError(f"--output_dir {path}: contains results of an experiment ({marker}); choose another folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--output_dir {path}: cannot be created: {reason}; choose another folder") from error
    return path


if __name__ == "__main__":
    sys.exit(main())
