"""`qdq autotune`."""

from __future__ import annotations

import typer

__all__ = ["autotune"]


def autotune(context: typer.Context) -> None:
    """Optimize one model with the command line, files and defaults of ModelOpt's autotune; no GPU is needed.

    Example: `qdq autotune --onnx_path model.onnx --output_dir out/model`
    """
    from harness.compat.modelopt_autotune.command import autotune as run
    from harness.terminal_progress import TerminalProgress

    with TerminalProgress() as terminal:
        try:
            run(context.args, "qdq autotune", terminal)
        except KeyboardInterrupt as stop:  # it has said what is kept
            raise typer.Exit(130) from stop
