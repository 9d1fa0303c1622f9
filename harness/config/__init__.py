"""Experiment files: sections with defaults, the strict YAML reader, and the plan of tasks."""
