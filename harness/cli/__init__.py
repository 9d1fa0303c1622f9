"""Subcommands of `qdq`: parameters, help text, and the call into the harness.

May import everything, inside functions where that keeps the start short.
Must not hold logic that a Python user would miss.
"""
