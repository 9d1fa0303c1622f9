"""Subcommands of `qdq`: options, help text, and the call into the harness."""
