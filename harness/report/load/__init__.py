"""Readers of results folders, finished or not.

May import `results_dir`, `config` and the log readers of `selection`.
Must not round or format a figure.
"""
