"""What `python -m harness.compat.modelopt_autotune` and `qdq autotune` do."""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.compat.modelopt_autotune.arguments import (
    ModePreset,
    get_node_filter_list,
    ineffective_flags,
    parse_arguments,
    parse_shapes,
    select_mode_preset,
)
from harness.compat.modelopt_autotune.benchmark import backend_use, init_benchmark_instance, split_arguments
from harness.compat.modelopt_autotune.common import AutotunerError, Config
from harness.compat.modelopt_autotune.procedure import AutotuneJob, run_job
from harness.compat.modelopt_autotune.region_index import untyped_linear_inputs
from harness.compat.modelopt_autotune.session import calibration_batches
from harness.config.sections import Limits, ModelSpec, PluginSpec
from harness.errors import UserError
from harness.graph.load import save_to_folder
from harness.graph.passes.dimension_errors import parse_dims
from harness.graph.qdq.import_placement import import_placement
from harness.graph.rules.dialects import TENSORRT
from harness.paths import resolve_path
from harness.progress import Observer
from harness.records import MAIN_BENCHMARKER
from harness.registry import find_entry_point
from harness.results_dir.fingerprint import CHANGED_RUN_ADVICE, FingerprintMismatch
from harness.task_setup.float_baseline import select_float_baseline
from harness.task_setup.model_loader import open_model
from harness.task_setup.task import read_runtime
from harness.timing.workers.sandbox import open_engines

__all__ = ["autotune"]

RESULTS_FOLDER_MARKERS = ("experiment.yaml", "cell.json")
"""What tells a results folder of `qdq run`, and that of one of its cells."""


def autotune(given: Sequence[str], prog: str, observer: Observer) -> None:
    """Run the command line.

    Raises:
        UserError: Anything in it that cannot be used.
    """
    options = parse_arguments(given, prog)
    depth = select_mode_preset(options)
    fresh = not Path(options.output_dir).exists()
    plan = replace(_make_job(options, observer), schemes_per_region=depth.schemes_per_region)
    try:
        with _forward_logs(options.verbose, observer):
            _run_autotune(options, depth, plan)
    except UserError:
        if fresh:
            with suppress(OSError):  # something came of it
                plan.output_dir.rmdir()
        raise
    except KeyboardInterrupt:
        kept = f"what was measured is in {plan.state}" if plan.state.exists() else "nothing was measured yet"
        observer.say(f"interrupted; {kept}: run the same command again to go on")
        raise


def _run_autotune(options: argparse.Namespace, depth: ModePreset, plan: AutotuneJob) -> None:
    backend = _select_backend(options)
    target = _describe_target(backend)
    plan.observer.say(f"searched for {target}")
    with TemporaryDirectory(prefix="qdq-autotune-") as scratch:
        spec = ModelSpec(
            use=options.onnx_path, label="model", shapes=parse_shapes(options), dims=parse_dims(options.dim or ())
        )
        model = open_model(spec, Path(scratch))
        for idle in ineffective_flags(options, backend.params, typed=not untyped_linear_inputs(model)):
            plan.observer.say(f"without effect: {idle}")
        if options.calibration_data is not None:  # what is wrong with files is told before anything is timed
            calibration_batches(model, options.calibration_data, options.calibration_samples)
        if plan.qdq_baseline is not None:
            import_placement(plan.qdq_baseline, model)
        use = _select_float_baseline(backend, save_to_folder(model, Path(scratch) / "float"), plan)
        benchmark = init_benchmark_instance(
            use_trtexec=options.use_trtexec,
            backend=use.use,
            params=use.params,
            warmup_runs=depth.warmup_runs,
            timing_runs=depth.timing_runs,
        )
        try:
            run_job(model, plan)
            if model.origin is None and (fixed := parse_shapes(options)):  # else it was said of the delivered model
                said = ", ".join(f"{name}: {shape}" for name, shape in fixed.items())
                plan.observer.say(f"The models written take these shapes alone: {said}")
            plan.observer.say(f"Made for {target}")
        finally:
            benchmark.close()


def _describe_target(use: PluginSpec) -> str:
    """Return what models are made for: backend, device and dialect, and for what they are not.

    Raises:
        UserError: The backend is not there, or has no dialect.
    """
    backend = read_runtime(use)
    device = backend.facts.get("device", "an unknown device")
    name = backend.dialect.name
    told = f"{use.use} on {device}, in the dialect {name} of Q/DQ pairs"
    if name == TENSORRT.name:
        return told
    return f"{told}; TensorRT wants other pairs: for a file that is meant for it, use --backend tensorrt"


@contextmanager
def _forward_logs(verbose: bool, observer: Observer) -> Iterator[None]:
    """Show what our parts log, down to the details, while a run lasts."""
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
    """Gives records to an observer, which knows how to write beside its own progress."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        self._observer.say(f"{record.name}: {record.getMessage()}")


def _make_job(options: argparse.Namespace, observer: Observer) -> AutotuneJob:
    if options.max_evals is not None and options.max_evals < 1:
        raise AutotunerError(f"--max_evals is at least 1, but got {options.max_evals}")
    if options.seed < 0:
        raise AutotunerError(f"--seed is at least 0, but got {options.seed}")
    if options.searcher is not None:
        find_entry_point("searcher", options.searcher)
    config = Config(
        default_quant_type=options.quant_type,
        default_dq_dtype=options.default_dq_dtype,
        verbose=options.verbose,
        searcher=options.searcher or "random_mutation",
        seed=options.seed,
        calibration_data=options.calibration_data,
        calibration_samples=options.calibration_samples,
    )
    baseline = options.qdq_baseline
    return AutotuneJob(
        output_dir=_check_output_folder(options.output_dir),
        pattern_cache_file=None if options.pattern_cache is None else Path(options.pattern_cache),
        state_file=None if options.state_file is None else Path(options.state_file),
        qdq_baseline=None if baseline is None else resolve_path(baseline),
        node_filters=tuple(get_node_filter_list(options.node_filter_list) or ()),
        config=config,
        whole=options.searcher is not None,
        max_evals=options.max_evals,
        observer=observer,
    )


def _check_output_folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise UserError(f"--output_dir {path}: is a file, not a folder; give another folder")
    if theirs := next((name for name in RESULTS_FOLDER_MARKERS if (path / name).exists()), None):
        raise UserError(f"--output_dir {path}: holds results of an experiment ({theirs}); give another folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output_dir {path}: cannot be made: {error.strerror or error}; give another folder"
        ) from error
    return path


def _select_backend(options: argparse.Namespace) -> PluginSpec:
    """The backend with TensorRT's options, as far as it takes them."""
    if options.use_trtexec and options.backend not in (None, "trtexec"):
        raise AutotunerError(f"--use_trtexec and --backend {options.backend}: choose one")
    name = "trtexec" if options.use_trtexec else options.backend or "openvino"
    plugins = [str(resolve_path(file).resolve()) for file in options.plugin_libraries or ()]
    extra = options.trtexec_benchmark_args
    given = {
        "plugin_libraries": plugins,
        "timing_cache_file": options.timing_cache,
        "trtexec_args": None if extra is None else split_arguments(extra),
    }
    return backend_use(name, given)


def _select_float_baseline(backend: PluginSpec, float_file: Path, plan: AutotuneJob) -> PluginSpec:
    """The backend at the float precision at which the float model is fastest: speedups are over that."""
    open_worker = partial(open_engines, limits=Limits())
    try:
        found = select_float_baseline(backend, float_file, plan.output_dir, open_worker, plan.observer)
    except FingerprintMismatch as error:
        raise UserError(
            str(error).replace(CHANGED_RUN_ADVICE, "use another --output_dir, or move away what is there")
        ) from error
    finally:
        shutil.rmtree(plan.output_dir / "work", ignore_errors=True)
    return found[MAIN_BENCHMARKER]
