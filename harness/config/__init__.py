"""Experiment files: sections with defaults, the strict YAML reader, and the plan of tasks.

May import the contracts (`api`, `registry`, `records`, `paths`, `errors`).
Must not import anything that loads models, times engines or reads results.
"""
