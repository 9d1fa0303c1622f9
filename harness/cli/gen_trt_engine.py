"""`qdq gen-trt-engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.errors import prefix_file

__all__ = ["gen_trt_engine"]


def gen_trt_engine(
    spec: Annotated[Path, typer.Argument(help="Spec file with a section 'gen_trt_engine'.", show_default=False)],
    backend: Annotated[
        str, typer.Option(help="Runtime that builds: tensorrt, or openvino or onnxruntime where there is none.")
    ] = "tensorrt",
    param: Annotated[
        list[str] | None, typer.Option("--param", help="Parameter of the backend, NAME=VALUE; repeat.")
    ] = None,
) -> None:
    """Build an engine from an ONNX file, float or with Q/DQ pairs, as a spec file says, and save it.

    Another runtime's engine is called after it (model.openvino) where the spec file asks for a name of TensorRT's.

    Example: `qdq gen-trt-engine experiments/specs/gen_trt_engine.yaml --backend openvino`
    """
    from harness.cli.common import add_to_sys_path, parse_param, short_path
    from harness.compat.tao_specs.engine import build_engine
    from harness.compat.tao_specs.engine_file import TENSORRT, engine_path
    from harness.compat.tao_specs.spec import read_spec, require_section
    from harness.config.sections import PluginSpec

    found, base = read_spec(spec), spec.resolve().parent
    add_to_sys_path(base)
    chosen = require_section(found.gen_trt_engine, "gen_trt_engine", str(spec))
    use = PluginSpec(use=backend, params=dict(parse_param(text) for text in param or []))
    with prefix_file(spec):
        facts = build_engine(chosen, found.dataset, base, use)
    kept = f"Q/DQ found ({', '.join(facts.precisions)})" if facts.precisions else "float"
    typed = f"{kept}: strongly typed" if facts.precisions and facts.backend == TENSORRT else kept
    version = facts.describe.get("version", "")
    asked = base / chosen.trt_engine
    path = engine_path(asked, backend)
    typer.echo(f"{short_path(path)}: {facts.backend} {version}, {typed}")
    if path != asked:
        typer.echo(
            f"called {path.name}, for no TensorRT can load it; where a spec file says {asked.name} and there is none, "
            "qdq evaluate takes it"
        )
