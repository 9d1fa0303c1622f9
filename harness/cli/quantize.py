"""`qdq quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.errors import prefix_file

__all__ = ["quantize"]


def quantize(
    spec: Annotated[Path, typer.Argument(help="Spec file with a section 'quantize'.", show_default=False)],
) -> None:
    """Quantize a model as a spec file says (TAO's static PTQ), by ModelOpt or, layer by layer, by our own engine.

    Example: `qdq quantize experiments/specs/quantize.yaml`
    """
    from harness.cli.common import add_to_sys_path, short_path
    from harness.compat.tao_specs.quantize import quantize as run
    from harness.compat.tao_specs.spec import read_spec, require_section

    found, base = read_spec(spec), spec.resolve().parent
    add_to_sys_path(base)
    chosen = require_section(found.quantize, "quantize", str(spec))
    with prefix_file(spec):
        done = run(chosen, found.dataset, base, base / (chosen.results_dir or found.results_dir))
    for op, counts in done.layers.items():
        typer.echo(f"{op}\t{', '.join(f'{count} {precision}' for precision, count in counts.items())}")
    typer.echo(f"{short_path(done.path)}: calibrated on {done.calibrated_on}")
