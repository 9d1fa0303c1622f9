"""Run of an experiment: searches of each task, final selection, transfer, export, checks, and reproduction.

May import `task_setup` and every package below it.
Must not import `compat`, `studies`, `analysis`, `explain` or `cli`.
"""
