"""`qdq evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["evaluate"]


def evaluate(
    specs: Annotated[
        list[Path], typer.Argument(help="Spec files with a section 'evaluate'; the first is the baseline.")
    ],
    suggest: Annotated[
        bool, typer.Option(help="Say which layers to leave native where the drop is above 0.01.")
    ] = True,
) -> None:
    """Score an engine or a model on labelled images; with several spec files, the drops against the first.

    Labels of boxes (.json, as COCO has them) give mAP; labels of classes (.txt, lines "FILENAME CLASS") give top-1.

    Example: `qdq evaluate baseline.yaml quantized.yaml`

    A classifier: `qdq evaluate experiments/specs/evaluate_classifier.yaml`
    """
    from harness.cli.common import add_to_sys_path, print_table
    from harness.compat.tao_specs.comparison import advise_native_layers, compare_evaluations
    from harness.compat.tao_specs.evaluate import evaluate as run
    from harness.compat.tao_specs.spec import read_spec
    from harness.terminal_progress import TerminalProgress

    found = {path: read_spec(path) for path in specs}
    for path in specs:
        add_to_sys_path(path.resolve().parent)
    with TerminalProgress() as terminal:
        scored = [run(spec, path, terminal) for path, spec in found.items()]
    lines = compare_evaluations(scored)
    header = ("spec", "engine or model", "precision", "metric [95 %]", "drop [95 %]", "note")
    print_table(header, [line.cells() for line in lines])
    models: set[Path | None] = set()
    for line, (path, spec) in zip(lines, found.items(), strict=True):
        known = line.scored.model in models
        models.add(line.scored.model)
        if suggest and not known:
            with TerminalProgress() as terminal:
                said = advise_native_layers(line, spec.dataset, path.resolve().parent, terminal)
            typer.echo("\n".join(said), nl=bool(said))
