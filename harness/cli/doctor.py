"""`qdq list`, `qdq doctor` and `qdq tools`: the installation and the machine."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from packaging.requirements import Requirement

from harness.base.errors import CandidateError, UserError, install_hint, suggest_names
from harness.base.text import printable
from harness.cli.common import JsonOption, echo, print_table

if TYPE_CHECKING:
    from harness.plugins.registry import Plugin

#: Imported module and installation command by name of the package.
INSTALL_COMMANDS: Mapping[str, tuple[str, str]] = {
    "openvino": ("openvino", install_hint("cpu")),
    "onnxruntime": ("onnxruntime", f"{install_hint('cpu')}, or {install_hint('modelopt')}, never both"),
    "modelopt": ("modelopt", install_hint("modelopt")),
    "nncf": ("nncf", install_hint("nncf")),
    "tensorrt": ("tensorrt", f"{install_hint('tensorrt')} (needs an NVIDIA GPU)"),
    "cuda-python": ("cuda.bindings", install_hint("tensorrt")),
    "tensorrt-rtx": ("tensorrt_rtx", f"{install_hint('rtx')} (a compiler; needs no GPU)"),
    "ray": ("ray", install_hint("ray")),
}
TIMING_FACTS = ("cpu.governor", "cpu.mhz", "cpu.turbo")  # they decide whether timings are stable, so always listed
PROGRAMS = {
    "trtexec": "part of TensorRT's archive, not of its pip package",
    "node": "https://nodejs.org; runs npm's onnxruntime-web",
}
ZOO_KIND = "zoo model"
LIST_WIDTH = 80  # columns of `qdq list`
NO_VNNI_WARNING = (
    "no VNNI: INT8 gains little, and products with weights of 8 bits saturate in 16-bit sums, so weights are stored in "
    "7 bits here (reduce_range); results do not transfer to processors with VNNI (docs/reference/accuracy.md)"
)

Row = tuple[str, str, str]


def doctor(as_json: JsonOption = False) -> None:
    """Show the runtimes that work on this machine, and how to install the others.

    Example: `qdq doctor`
    """
    rows = examine_machine()
    ok = {name for name, state, _ in rows if state == "ok"}
    timed = [name for each in sorted(ok) if (name := each.removeprefix("benchmarker ")) != each]
    runtimes = [name for name in timed if name not in ("replay", "simulated")]
    quantizers = [name for name in ("modelopt", "nncf") if name in ok]
    uses = [f"measurements on {', '.join(runtimes)}"] if runtimes else []
    uses += [f"PTQ by {', '.join(quantizers)}"] if quantizers else []
    remedy = "" if runtimes else f"; no runtime works: {INSTALL_COMMANDS['openvino'][1]}"
    ready = f"ready for: {'; '.join([*uses, 'replays and simulated runs'])}{remedy}"
    print_table(("what", "state", "detail"), rows, [ready], as_json=as_json)


def tools(
    action: Annotated[str, typer.Argument(help="Action: install or list.")] = "list",
    name: Annotated[str, typer.Argument(help="With install: name of the tool.")] = "",
    index_url: Annotated[
        str | None, typer.Option(help="URL of an additional package index, such as PyTorch's for CPUs.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List or install quantization tools that need a separate environment because of conflicting dependencies.

    Example: `qdq tools install quark`
    """
    from harness.accuracy.tools.ptq import install_environment

    if action not in ("list", "install"):
        raise UserError(f"qdq tools: install or list, but got {action!r}")
    if action == "install":
        install_environment(name, index_url)
    print_table(("what", "state", "detail"), list(_tool_environments()), as_json=as_json)


def examine_machine() -> list[Row]:
    """Return rows (name, state, detail) about runtimes, plug-ins, data and the machine.

    States are words such as "ok" and "missing"; the detail of a missing thing is its remedy.
    """
    return [*_packages(), *_plugins(), *_tool_environments(), *_machine()]


def _packages() -> Iterator[Row]:
    lacking = set[str]()  # packages that our requirements leave out for this version of Python or this system
    for text in requires("qdq-bench") or ():
        requirement, extra = Requirement(text), re.search(r"extra == ['\"]([^'\"]+)", text)
        if extra and requirement.marker and not requirement.marker.evaluate({"extra": extra[1]}):
            lacking.add(requirement.name.removesuffix("-cu12"))
    for name, (module, remedy) in INSTALL_COMMANDS.items():
        try:
            is_installed = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            is_installed = False
        if not is_installed and name in lacking:
            remedy = f"has no wheels for Python {sys.version_info.major}.{sys.version_info.minor}; use another version"
        yield (name, "ok" if is_installed else "missing", "" if is_installed else remedy)
    both = []  # of two distributions that install the same files, one overwrites the other
    for name in ("onnxruntime", "onnxruntime-gpu"):
        with suppress(PackageNotFoundError):
            both.append(f"{name} {version(name)}")
    if len(both) > 1:
        remedy = "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu"
        yield ("onnxruntime twice", "warning", f"{' and '.join(both)} overwrite each other: {remedy}")


def _plugins() -> Iterator[Row]:
    """Yield all benchmarkers, and the plug-ins of other kinds that cannot be loaded."""
    from harness.plugins import registry

    for plugin in (each for kind in registry.ENTRY_POINT_GROUPS for each in registry.installed_plugins(kind)):
        kind, what = plugin.kind, f"{plugin.kind} {plugin.name}"
        try:
            if kind != "benchmarker":
                registry.load_plugin(kind, plugin.name)
            elif plugin.name == "replay":
                yield (what, "ok", "replays a recorded table: qdq bench replay TABLE")
            else:
                facts = registry.call_plugin(what, partial(_describe, plugin.name))
                known = (key for key in ("version", "device", "float_precision") if key in facts)
                yield (what, "ok", ", ".join(f"{key} {facts[key]}" for key in known))
        except (UserError, CandidateError) as error:
            yield (what, "not usable", " ".join(str(error).removeprefix(f"{what}: ").split()))


def _describe(benchmarker: str) -> dict[str, Any]:
    from harness.plugins import registry

    return dict(registry.create_plugin("benchmarker", benchmarker, {}).describe())


def _tool_environments() -> Iterator[Row]:
    from harness.accuracy.tools.ptq import REQUIREMENTS, environment_python

    for name, requirements in REQUIREMENTS.items():
        ready = environment_python(name) is not None
        yield (f"tool {name}", "ok" if ready else "missing", requirements[0] if ready else f"qdq tools install {name}")


def _machine() -> Iterator[Row]:
    from harness.measure.provenance import describe_environment, lacks_vnni

    for name, remedy in PROGRAMS.items():
        path = shutil.which(name)
        yield (name, "ok" if path else "missing", path or remedy)
    assets = os.environ.get("QDQ_ASSETS", "")
    state = "not set" if not assets else "ok" if os.path.isdir(assets) else "no such folder"
    yield ("QDQ_ASSETS", state, assets or "folder with models and images for assets: paths")
    facts = describe_environment()
    gpus = facts.pop("gpus", [])
    if not gpus:
        yield ("gpu", "none found", "nvidia-smi is missing or lists none; not needed for CPU backends")
    for index, gpu in enumerate(gpus):
        yield (f"gpu {index}", "ok", ", ".join(f"{field} {value}" for field, value in gpu.items()))
    if lacks_vnni(facts):
        yield ("int8 on this cpu", "warning", NO_VNNI_WARNING)
    flat = dict(_flatten(facts))
    for key in TIMING_FACTS:
        yield (key, "" if key in flat else "not readable", flat.pop(key, ""))
    yield from ((key, "", value) for key, value in flat.items())


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, bool):
            yield f"{prefix}{key}", "on" if value else "off"
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def list_plugins(
    kind: Annotated[str, typer.Argument(help="Kind of plug-in, such as searcher; default: the names of all.")] = "",
    as_json: JsonOption = False,
) -> None:
    """List searchers, runtimes (benchmarkers), evaluators, preprocessings, estimators, dialects and zoo models.

    Example: `qdq list searcher`
    """
    from harness import zoo
    from harness.plugins.registry import ENTRY_POINT_GROUPS, installed_plugins

    kinds = [*ENTRY_POINT_GROUPS, ZOO_KIND]
    asked = kind.replace("_", " ").replace("-", " ").removesuffix("s")
    if kind and asked not in kinds:
        raise UserError(f"qdq list {kind}: no such kind; {suggest_names(asked, kinds)}")
    plugins = [plugin for each in ENTRY_POINT_GROUPS for plugin in installed_plugins(each)]
    rows = [
        (plugin.kind, plugin.name, plugin.origin, plugin_purpose(plugin) if kind or as_json else "")
        for plugin in plugins
        if asked in ("", plugin.kind)
    ]
    if asked in ("", ZOO_KIND):
        rows += [(ZOO_KIND, name, "", purpose) for name, purpose in zoo.model_names().items()]
    if as_json:
        print_table(("kind", "name", "origin", "what it does"), rows, as_json=True)
    elif kind and not rows:
        echo(f"no {asked} is installed; docs/architecture.md says how to add one")
    elif kind:
        foreign = {origin for _, _, origin, _ in rows if origin and not origin.startswith("qdq-bench ")}
        _print_entries([(n, f"{text} [{origin}]" if origin in foreign else text) for _, n, origin, text in rows])
    else:
        _print_entries([(each, ", ".join(name for of, name, *_ in rows if of == each)) for each in kinds])
        echo("qdq list KIND describes each; qdq list KIND --json: with its distribution")


def _print_entries(entries: Sequence[tuple[str, str]]) -> None:
    """Print names with their texts behind them, wrapped at 80 columns."""
    width = min(40, max((len(name) for name, _ in entries), default=0) + 2)
    for name, text in entries:
        lines = textwrap.wrap(printable(text), LIST_WIDTH - width) or [""]
        echo(f"\n{' ' * width}".join([f"{name:<{width}}{lines[0]}", *lines[1:]]))


def plugin_purpose(plugin: Plugin) -> str:
    """Return the first line of a plug-in's docstring, the form of a dialect, or "" without a docstring.

    The source is parsed, not imported, so that a slow or broken plug-in does not affect the others.
    """
    from harness.graph.rules.dialects import INT8_MAX_LEVEL, load_dialect

    if plugin.kind == "dialect":
        try:
            dialect = load_dialect(plugin.name)
        except UserError as error:
            return f"cannot be used: {error}"
        zero = "symmetric" if dialect.symmetric_activation else "with zero points"
        bits = 8 if dialect.weight_limit >= INT8_MAX_LEVEL else 7
        precisions = ", ".join(sorted(dialect.precisions))
        return f"Q/DQ pairs for {precisions}: {dialect.activation.upper()} activations {zero}, weights of {bits} bits"
    point = plugin.entry_point
    try:
        spec = importlib.util.find_spec(point.module)
        tree = ast.parse(Path(spec.origin or "").read_text(encoding="utf-8")) if spec else ast.Module([], [])
    except (ImportError, OSError, SyntaxError, ValueError):
        return "cannot be read: its module is missing or is not valid Python"
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == point.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return (ast.get_docstring(tree) or "").partition("\n")[0]  # the attribute is assigned or imported
