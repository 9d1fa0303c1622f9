"""Classes that ModelOpt has in one module of this name."""

from __future__ import annotations

from harness.compat.modelopt_autotune.insertion_points import (
    ChildRegionInputInsertionPoint,
    ChildRegionOutputInsertionPoint,
    InsertionPoint,
    NodeInputInsertionPoint,
    Region,
    RegionType,
    ResolvedInsertionPoint,
)
from harness.compat.modelopt_autotune.region_pattern import InsertionScheme, PatternSchemes
from harness.compat.modelopt_autotune.session import PatternCache
from harness.compat.modelopt_autotune.settings import (
    AutotunerError,
    AutotunerNotInitializedError,
    Config,
    InvalidSchemeError,
)

__all__ = [
    "AutotunerError", "AutotunerNotInitializedError", "ChildRegionInputInsertionPoint",
    "ChildRegionOutputInsertionPoint", "Config", "InsertionPoint", "InsertionScheme", "InvalidSchemeError",
    "NodeInputInsertionPoint", "PatternCache", "PatternSchemes", "Region", "RegionType", "ResolvedInsertionPoint",
]  # fmt: skip
