"""Workflow and benchmark functions with the names of ModelOpt's autotune."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.compat.modelopt_autotune.autotuner import QDQAutotuner, Transform
from harness.compat.modelopt_autotune.benchmark import benchmark_onnx_model, init_benchmark_instance
from harness.compat.modelopt_autotune.common import AutotunerError, Config
from harness.compat.modelopt_autotune.procedure import AutotuneJob, run_job

__all__ = ["benchmark_onnx_model", "init_benchmark_instance", "region_pattern_autotuning_workflow"]


def region_pattern_autotuning_workflow(  # noqa: PLR0913 - the signature is ModelOpt's
    model_path: Any = None,
    output_dir: Path | None = None,
    num_schemes_per_region: int = 30,
    pattern_cache_file: str | None = None,
    state_file: str | None = None,
    quant_type: str = "int8",
    default_dq_dtype: str = "float32",
    qdq_baseline_model: str | None = None,
    node_filter_list: Sequence[str] | None = None,
    verbose: bool = False,
    model_transform: Transform | None = None,
    *,
    model_or_path: Any = None,
    calibration_data: str | None = None,
    calibration_samples: int | None = None,
) -> QDQAutotuner:
    """Optimize a model region after region; call `init_benchmark_instance` first.

    Args:
        model_path: File of the model, or an `onnx.ModelProto`.
        output_dir: Takes all files; None: none are kept.
        num_schemes_per_region: Schemes that are measured for one pattern at most.
        pattern_cache_file: Pattern cache of an earlier run; one that is not there is warned of.
        state_file: By default `autotuner_state.yaml` in the output folder. Where it is there, the run goes on.
        quant_type: "int8" or "fp8".
        default_dq_dtype: Type of tensors whose type cannot be inferred.
        qdq_baseline_model: Q/DQ model made from this model, to begin with.
        node_filter_list: Wildcards; regions without any node whose name matches one of them stay float.
        verbose: See `Config`.
        model_transform: Applied to each `onnx.ModelProto` before it is built or written.
        model_or_path: Another name of `model_path`, which ModelOpt's later versions use.
        calibration_data: See `Config`, as for the next.
        calibration_samples: Number of its samples at most; None: all.

    Returns:
        The autotuner as it is in the end.

    Raises:
        AutotunerNotInitializedError: There is no benchmark.
        UserError: Anything given that cannot be used, or a float model that cannot be timed.
    """
    model = model_or_path if model_path is None else model_path
    if model is None:
        raise AutotunerError("region_pattern_autotuning_workflow needs model_path: a file or an onnx.ModelProto")
    with contextlib.ExitStack() as stack:
        folder = output_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qdq-autotune-")))
        config = Config(
            default_quant_type=quant_type,
            default_dq_dtype=default_dq_dtype,
            verbose=verbose,
            calibration_data=calibration_data,
            calibration_samples=calibration_samples,
        )
        plan = AutotuneJob(
            output_dir=Path(folder),
            schemes_per_region=num_schemes_per_region,
            pattern_cache_file=None if pattern_cache_file is None else Path(pattern_cache_file),
            state_file=None if state_file is None else Path(state_file),
            qdq_baseline=None if qdq_baseline_model is None else Path(qdq_baseline_model),
            node_filters=tuple(node_filter_list or ()),
            config=config,
            transform=model_transform,
        )
        return run_job(model, plan)
