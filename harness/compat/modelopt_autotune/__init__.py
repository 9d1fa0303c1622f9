"""Drop-in replacement for ModelOpt's `autotune` API, command line and output files.

    from harness.compat.modelopt_autotune import Config, QDQAutotuner
    from harness.compat.modelopt_autotune.workflows import benchmark_onnx_model, init_benchmark_instance

docs/reference/autotune.md lists each name with its differences.
"""

from __future__ import annotations

from harness.compat.modelopt_autotune.autotuner import QDQAutotuner, QDQAutotunerBase
from harness.compat.modelopt_autotune.benchmark import Benchmark, TensorRTPyBenchmark, TrtExecBenchmark
from harness.compat.modelopt_autotune.common import (
    AutotunerError,
    AutotunerNotInitializedError,
    ChildRegionInputInsertionPoint,
    ChildRegionOutputInsertionPoint,
    Config,
    InsertionPoint,
    InsertionScheme,
    InvalidSchemeError,
    NodeInputInsertionPoint,
    PatternCache,
    PatternSchemes,
    Region,
    RegionType,
    ResolvedInsertionPoint,
)
from harness.compat.modelopt_autotune.region_pattern import RegionPattern
from harness.compat.modelopt_autotune.region_search import CombinedRegionSearch, get_node_filter_list
from harness.compat.modelopt_autotune.settings import MODE_PRESETS
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
