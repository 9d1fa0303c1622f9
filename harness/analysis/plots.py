"""Plots of analyses as PNG: errors of layers, components of noise, sensitivities; and the helper that writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from harness.analysis.noise import Floats, NoiseComponents
from harness.analysis.sensitivity import QuantizationUnit, SensitivityAnalysis, UnitEffect
from harness.records import Failed

#: Distinct for colour-blind readers too (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
LABELLED_UNITS = 5  # units whose name is written next to their dots


@contextmanager
def figure_file(path: Path, columns: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield axes in a row, and write them to a PNG on exit; text is not parsed as formulas."""
    with mpl.rc_context({"text.usetex": False, "text.parse_math": False, "font.size": 9}):
        figure = Figure(figsize=(3.2 * sum(columns) if len(columns) > 1 else 6.4, 4.0), layout="constrained")
        yield tuple(figure.subplots(1, len(columns), squeeze=False, width_ratios=columns)[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)


def draw_layer_losses(before_db: Mapping[str, float], after_db: Mapping[str, float], title: str, path: Path) -> None:
    """Plot the SQNR of each layer's output in the order of the graph, without and with recovery.

    Args:
        before_db: SQNR in dB by the name of the layer.
        after_db: SQNR in dB of the recovered model, by the name of the layer.
        path: PNG to write.
    """
    with figure_file(path, columns=(1,)) as (axes,):
        for label, colour, values in (("as given", COLOURS[1], before_db), ("recovered", COLOURS[0], after_db)):
            axes.plot(range(len(values)), list(values.values()), ".-", color=colour, label=label, linewidth=1)
        worst = min(before_db, key=lambda name: before_db[name])
        axes.annotate(worst, (list(before_db).index(worst), before_db[worst]), fontsize=7, va="top")
        axes.set(title=title, xlabel="layer, in the order of the graph", ylabel="SQNR of its result in dB")
        axes.grid(alpha=0.3)
        axes.legend()


def draw_noise(latency_ms: Floats, found: NoiseComponents, title: str, path: Path) -> None:
    """Plot all readings by build, with one colour for each process, and the components of noise.

    Args:
        latency_ms: Latencies as [process, build, reading].
        path: PNG to write.
    """
    processes, builds, readings = latency_ms.shape
    with figure_file(path, columns=(2, 1)) as (left, right):
        for process in range(processes):
            colour = COLOURS[process % len(COLOURS)]
            for build in range(builds):
                place = (process * builds + build) * (readings + readings // 5) + np.arange(readings)
                left.plot(place, latency_ms[process, build], ".", ms=2, color=colour)
                median = np.median(latency_ms[process, build])
                left.plot(place[[0, -1]], [median, median], color="black", linewidth=1)
        left.set_xticks([])
        left.set_xlabel("readings of each build, which took turns; a colour is a process, a line a build's median")
        left.set_ylabel("latency, ms")
        left.set_title(title)
        sd = [100 * component.sd.value for component in found.components]
        errors = [[100 * abs(getattr(c.sd, end) - c.sd.value) for c in found.components] for end in ("low", "high")]
        right.bar(range(len(sd)), sd, yerr=errors, capsize=4, color="#56B4E9")
        right.set_xticks(range(len(sd)), [component.name.replace(" ", "\n", 1) for component in found.components])
        right.set_ylabel("standard deviation, % of latency")
        right.grid(alpha=0.25, axis="y")


def draw_sensitivities(found: SensitivityAnalysis, path: Path) -> None:
    """Plot the loss of fidelity over the microseconds gained, one dot per unit: quantized alone, and left out.

    Colours show roles, bars 95 % intervals; the units with the best rank are labelled.

    Args:
        found: The units, best first.
        path: PNG to write.
    """
    roles = list(dict.fromkeys(each.unit.role for each in found.units))
    colours = {role: COLOURS[index % len(COLOURS)] for index, role in enumerate(roles)}
    with figure_file(path, columns=(2, 2)) as (left, right):
        _draw_effects(left, [(each.unit, each.alone, 0.0) for each in found.units], colours)
        compared = [each for each in found.units if each.unit.precision in found.full_db]
        _draw_effects(
            right, [(each.unit, each.left_out, found.full_db[each.unit.precision]) for each in compared], colours
        )
        left.set_title("alone in the float model")
        left.set_ylabel("SQNR, dB (lower: more is lost)")
        right.set_title("left out of the full model")
        right.set_ylabel("SQNR regained, dB")
        for role, colour in colours.items():
            left.plot([], [], "o", color=colour, label=role)
        left.legend(frameon=False, fontsize=7)


def _draw_effects(
    axes: Any, effects: Sequence[tuple[QuantizationUnit, UnitEffect | Failed, float]], colours: Mapping[str, str]
) -> None:
    """Draw the SQNR of each unit relative to its base, in dB, over the time that quantizing it gains."""
    for rank, (unit, effect, base_db) in enumerate(effects):
        if isinstance(effect, Failed) or effect.gain_us is None:
            continue
        gain, place = effect.gain_us, (effect.gain_us.value, effect.sqnr_db - base_db)
        reach = [[max(0.0, gain.value - gain.low)], [max(0.0, gain.high - gain.value)]]
        axes.errorbar(*place, xerr=reach, fmt="o", ms=4, color=colours[unit.role], linewidth=0.6, alpha=0.8)
        if rank < LABELLED_UNITS:
            axes.annotate(unit.name[:20], place, fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.axvline(0, color="0.6", linewidth=0.8)
    axes.set_xlabel("microseconds gained by quantizing it")
    axes.grid(alpha=0.25)
