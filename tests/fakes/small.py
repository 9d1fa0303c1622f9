"""What many tests begin with: the command in this process, and networks that are measured in no time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.cli.main import main
from harness.graph.builder import GraphBuilder

__all__ = ["qdq", "save_chain", "save_small"]


def qdq(*arguments: str) -> int:
    """Run the command in this process and give its exit code."""
    try:
        main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def save_chain(path: Path, channels: Sequence[int], *, size: int = 16, seed: int = 1) -> Path:
    """Convolutions of these numbers of channels in a row, each with its Relu, and the mean over the image."""
    builder = GraphBuilder(path.stem, seed=seed)
    builder.output(builder.op("GlobalAveragePool", _chain(builder, channels, size)))
    return builder.save(path)


def save_small(path: Path) -> Path:
    """Four convolutions with their Relu, and a residual Add behind them."""
    builder = GraphBuilder(path.stem, seed=1)
    x = _chain(builder, (8, 8, 12, 12), 16)
    builder.output(builder.op("GlobalAveragePool", builder.op("Add", x, builder.conv(x, 12, 1))))
    return builder.save(path)


def _chain(builder: GraphBuilder, channels: Sequence[int], size: int) -> str:
    x = builder.input("x", (1, 3, size, size))
    for count in channels:
        x = builder.op("Relu", builder.conv(x, count, 3, pad=1))
    return x
