"""Subcommands of `qdq`: options, help text, and the call into the harness.

May import every package, inside functions if that keeps the start fast. Must not contain logic that Python users need.
"""
