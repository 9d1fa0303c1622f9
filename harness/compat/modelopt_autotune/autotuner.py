"""The autotuner that finds the regions itself, and the search for regions alone."""

from __future__ import annotations

from typing import Any

from harness.compat.modelopt_autotune.autotuner_base import QDQAutotunerBase
from harness.compat.modelopt_autotune.cache import PatternCache
from harness.compat.modelopt_autotune.common import Config
from harness.compat.modelopt_autotune.region_index import RegionIndex
from harness.compat.modelopt_autotune.regions import Region, RegionType

__all__ = ["CombinedRegionSearch", "QDQAutotuner"]


class QDQAutotuner(QDQAutotunerBase):
    """Profiles the regions that the engine discovers, LEAF regions first."""

    def initialize(self, config: Config | None = None, pattern_cache: PatternCache | None = None) -> None:
        """See `QDQAutotunerBase.initialize`; also finds the regions."""
        super().initialize(config, pattern_cache)
        tops = self.graph.discover(self.config.maximum_sequence_region_size, self.config.minimum_topdown_search_size)
        found = [region for top in tops for region in top.walk()]
        self.regions = sorted(found, key=lambda region: region.type is not RegionType.LEAF)


class CombinedRegionSearch:
    """Finds the regions of a model.

    Args:
        graph: The `graph` of an autotuner, an `onnx.ModelProto` or an `onnx_graphsurgeon.Graph`.
        maximum_sequence_region_size: Most nodes of a LEAF that is a sequence.
        minimum_topdown_search_size: A convergence of at least so many nodes is split.
    """

    def __init__(
        self, graph: Any, maximum_sequence_region_size: int = 10, minimum_topdown_search_size: int = 10
    ) -> None:
        self.graph = graph if isinstance(graph, RegionIndex) else QDQAutotunerBase(graph).graph
        self.maximum_sequence_region_size = maximum_sequence_region_size
        self.minimum_topdown_search_size = minimum_topdown_search_size
        self.regions: list[Region] = []

    def search_regions(self) -> list[Region]:
        """The regions right below the whole model; each node is in one LEAF at or below one of them."""
        self.regions = self.graph.discover(self.maximum_sequence_region_size, self.minimum_topdown_search_size)
        return self.regions
