"""ModelOpt's region_inspect, with the output of `qdq inspect regions`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from harness.base.errors import MAX_COUNT, UserError
from harness.base.text import printable_lines
from harness.compat.modelopt_autotune.insertion_points import Region, has_quantizable_operations
from harness.compat.modelopt_autotune.region_pattern import RegionIndex
from harness.compat.modelopt_autotune.region_search import CombinedRegionSearch
from harness.compat.modelopt_autotune.settings import add_sizes
from harness.graph.passes.static_shapes import parse_dims, parse_named_shapes
from harness.insight.region_report import inspect_regions


def inspect_region_search(
    onnx_path: str,
    max_sequence_size: int = 10,
    include_all_regions: bool = False,
    *,
    verbose: bool = False,
    shapes: Mapping[str, str] = MappingProxyType({}),
    dims: Mapping[str, int] = MappingProxyType({}),
) -> list[Region]:
    """Print the regions of a model and return them: the topmost ones, each with its child regions.

    Args:
        onnx_path: ONNX file; also `zoo:NAME` or `assets:PATH`.
        max_sequence_size: Maximum number of nodes of a LEAF that is a sequence.
        include_all_regions: Include LEAF regions without an operator that gains from Q/DQ.
        verbose: Print the names of nodes and boundary tensors, too.
        shapes: Static shapes by input, such as "1x3x224x224".
        dims: Sizes of dynamic dimensions by symbol.
    """
    report = inspect_regions(onnx_path, shapes, dims=dims, max_sequence_size=max_sequence_size)
    print(printable_lines("\n".join(report.lines(include_all=include_all_regions, verbose=verbose))))
    graph = RegionIndex(report.model)
    tops = CombinedRegionSearch(graph, maximum_sequence_region_size=max_sequence_size).search_regions()
    regions = [region for top in tops for region in (top, *top.get_children())]
    return [region for region in regions if include_all_regions or has_quantizable_operations(region, graph)]


def main(given: Sequence[str] | None = None) -> int:
    """Print the regions of a model; return 1 after any error, as ModelOpt's program does."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.compat.modelopt_autotune.region_inspect",
        description="Show the regions of a model, as `qdq inspect regions` does.",
    )
    parser.add_argument("--model", "-m", required=True, help="ONNX file; also zoo:NAME or assets:PATH")
    parser.add_argument("--verbose", "-v", action="store_true", help="show the names of nodes and boundary tensors")
    parser.add_argument("--max-sequence-size", type=int, default=10, help="longest sequence (default: %(default)s)")
    parser.add_argument("--include-all-regions", action="store_true", help="list regions without quantizable operators")
    add_sizes(parser)
    options = parser.parse_args(given)
    if not 1 <= options.max_sequence_size <= MAX_COUNT:
        limits = f"at least 1, at most {MAX_COUNT:,}"
        parser.error(f"--max-sequence-size is {limits}, but got {options.max_sequence_size}")
    try:
        inspect_region_search(
            options.model,
            max_sequence_size=options.max_sequence_size,
            include_all_regions=options.include_all_regions,
            verbose=options.verbose,
            shapes=parse_named_shapes("--shape", options.shape or ()),
            dims=parse_dims(options.dim or ()),
        )
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        print(f"region_inspect: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
