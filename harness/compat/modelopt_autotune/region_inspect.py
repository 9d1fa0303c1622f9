"""Command line of ModelOpt's region_inspect, with the output of `qdq regions`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from harness.analysis.region_report import inspect_regions
from harness.compat.modelopt_autotune.settings import add_sizes, parse_shapes
from harness.errors import MAX_COUNT, UserError
from harness.graph.partition.summary import TreeOptions
from harness.graph.passes.static_shapes import parse_dims
from harness.text import printable_lines

__all__ = ["main"]


def main(given: Sequence[str] | None = None) -> int:
    """Print the regions of a model; return 2 after a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.compat.modelopt_autotune.region_inspect",
        description="Show the regions of a model, as `qdq regions` does.",
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
        dims = parse_dims(options.dim or ())
        found = inspect_regions(
            options.model, parse_shapes(options), dims=dims, max_sequence_size=options.max_sequence_size
        )
    except UserError as error:
        print(f"region_inspect: {error}", file=sys.stderr)
        return 2
    view = TreeOptions(include_all=options.include_all_regions, verbose=options.verbose)
    print(printable_lines("\n".join(found.lines(view))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
