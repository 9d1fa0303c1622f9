"""Text of the report of a model to deploy: figures with intervals, settings, calibration and limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.base.text import printable
from harness.measure.provenance import format_options, format_scenario
from harness.results.scores import metric_name

Facts = Mapping[str, Any]


def report_text(facts: Facts, runtime_title: str) -> str:
    """Return the report as Markdown.

    Args:
        facts: Content of `ship.json`.
        runtime_title: Name of the runtime.
    """
    lines = [
        f"# {facts['name']}",
        "",
        f"{facts['answer']}.",
        "",
        *_figures(facts),
        "",
        "## Measured with",
        "",
        *(f"- {line}" for line in _conditions(facts, runtime_title)),
        "",
        "## Limits",
        "",
        *(f"- {line}" for line in _limits(facts)),
        "",
        "## Files",
        "",
        *(f"- {line}" for line in _files(facts)),
        "",
    ]
    return "\n".join(map(printable, lines))


def _figures(facts: Facts) -> Iterator[str]:
    own, base = facts["footprint"]["model"], facts["footprint"]["float"]
    rows: list[tuple[str, ...]] = [
        ("latency, ms, median [95 %]", _interval(facts["float_latency_ms"]), _interval(facts["latency_ms"])),
        ("latency, ms, 99th percentile", _number(facts["float_p99_ms"]), _number(facts["p99_ms"])),
        ("file, MB", _number(base["file_mb"]), _number(own["file_mb"])),
        ("load and first run, ms", _number(base.get("load_ms"), 0), _number(own.get("load_ms"), 0)),
        ("peak memory, MB", _number(base.get("peak_memory_mb"), 0), _number(own.get("peak_memory_mb"), 0)),
    ]
    if facts["metric"] is not None:
        scores = (_number(facts[key], 4) for key in ("float_score", "score"))
        rows.insert(2, (metric_name(facts["metric"]), *scores))
    yield "| | float | this file |"
    yield "|---|---|---|"
    yield from (f"| {name} | {before} | {after} |" for name, before, after in rows)
    if facts.get("shapes"):
        yield from ("", "| shape | float, ms | this file, ms | speedup [95 %] |", "|---|---|---|---|")
    for shape, each in (facts.get("shapes") or {}).items():
        cells = (_interval(each["float_latency_ms"]), _interval(each["latency_ms"]), _interval(each["speedup"], 2))
        yield f"| {shape} | {' | '.join(cells)} |"
    for name in ("model", "float"):
        if reason := facts["footprint"][name].get("reason"):
            yield ""
            yield f"Not run ({name}): {reason}"


def _conditions(facts: Facts, runtime_title: str) -> Iterator[str]:
    runtime = facts["runtime"]
    yield f"{runtime_title} {runtime.get('version', '')} on {runtime.get('device', 'unknown')}"
    options = runtime.get("options", {})
    settings = {name: value for name, value in options.items() if name not in ("streams", "shapes")}
    yield f"{format_scenario(options)}; {format_options(settings)}"
    floor = f"noise floor {100 * facts['noise_floor']:.1f} %"
    yield f"{facts['builds']} fresh builds in turns with the float model, {floor}"
    packages = facts["packages"]
    yield f"Python {facts['python']}; " + ", ".join(f"{name} {version}" for name, version in packages.items())
    calibration = facts["calibration"]
    yield f"calibration: {calibration['data']}, method {calibration['method']}, ranges {calibration['ranges']}"


def _limits(facts: Facts) -> Iterator[str]:
    yield "The figures hold for this kind of processor, this version of the runtime, and these settings."
    if facts["metric"] is None:
        yield "Accuracy was not measured."
    elif facts["bound"] is None:
        yield "No bound on accuracy was set."
    else:
        yield f"Bound on the loss of {metric_name(facts['metric'])}: {facts['bound']:g}."
    if facts["calibration"]["data"] == "random data":
        yield "The ranges are those of random data: calibrate with data of your own before use."
    if facts["dynamic_file"] is None:
        yield "The file accepts only the input shapes in deploy.py."


def _files(facts: Facts) -> Iterator[str]:
    yield f"`{facts['file']}`: the bytes that were timed and scored, SHA-256 of the model `{facts['sha256']}`"
    if facts["dynamic_file"]:
        yield f"`{facts['dynamic_file']}`: the same Q/DQ pairs with dynamic axes; {facts['dynamic_remark']}"
    yield "`deploy.py`: loads the file with the measured settings and runs one input; `python deploy.py --help`"
    yield "`SHA256SUMS`: digests, for `sha256sum -c SHA256SUMS` or for `qdq verify FOLDER`, which also runs the model"


def _interval(values: Sequence[float], digits: int = 3) -> str:
    value, low, high = (f"{each:.{digits}f}" for each in values)
    return f"{value} [{low}, {high}]"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
