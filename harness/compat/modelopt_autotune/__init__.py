"""Drop-in replacement for ModelOpt's `autotune` API, command line and output files.

    from harness.compat.modelopt_autotune import Config, QDQAutotuner
    from harness.compat.modelopt_autotune.workflows import benchmark_onnx_model, init_benchmark_instance

docs/reference/autotune.md lists each name with its differences.
"""

from __future__ import annotations

from harness.compat.modelopt_autotune.autotuner import CombinedRegionSearch, QDQAutotuner, QDQAutotunerBase
from harness.compat.modelopt_autotune.benchmark import Benchmark, TensorRTPyBenchmark, TrtExecBenchmark
from harness.compat.modelopt_autotune.regions import Region, RegionType
from harness.compat.modelopt_autotune.schemes import (
    ChildRegionInputInsertionPoint,
    ChildRegionOutputInsertionPoint,
    InsertionPoint,
    InsertionScheme,
    NodeInputInsertionPoint,
    PatternSchemes,
    RegionPattern,
    ResolvedInsertionPoint,
)
from harness.compat.modelopt_autotune.settings import (
    MODE_PRESETS,
    AutotunerError,
    AutotunerNotInitializedError,
    Config,
    InvalidSchemeError,
    get_node_filter_list,
)
from harness.compat.modelopt_autotune.storage import PatternCache
from harness.compat.modelopt_autotune.workflows import (
    benchmark_onnx_model,
    init_benchmark_instance,
    region_pattern_autotuning_workflow,
)

__all__ = [
    "MODE_PRESETS", "AutotunerError", "AutotunerNotInitializedError", "Benchmark", "ChildRegionInputInsertionPoint",
    "ChildRegionOutputInsertionPoint", "CombinedRegionSearch", "Config", "InsertionPoint", "InsertionScheme",
    "InvalidSchemeError", "NodeInputInsertionPoint", "PatternCache", "PatternSchemes", "QDQAutotuner",
    "QDQAutotunerBase", "Region", "RegionPattern", "RegionType", "ResolvedInsertionPoint", "TensorRTPyBenchmark",
    "TrtExecBenchmark", "benchmark_onnx_model", "get_node_filter_list", "init_benchmark_instance",
    "region_pattern_autotuning_workflow",
]  # fmt: skip
