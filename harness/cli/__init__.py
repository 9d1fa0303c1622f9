"""The subcommands of `qdq`, one a module: parameters, help text, and the call into the harness."""
