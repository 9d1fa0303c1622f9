"""From journals to tables, plots and the page. `load` gives a results folder as pandas frames."""

from harness.report.render import Frames, load, render

__all__ = ["Frames", "load", "render"]
