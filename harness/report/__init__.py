"""From journals to tables and plots."""

from harness.report.page import render

__all__ = ["render"]
