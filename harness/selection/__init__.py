"""Comparison of candidates on fresh builds: paired timing, racing, confirmation.

May import `timing`, `results_dir` and `config`.
Must not import `task_setup`, `pipeline` or `report`.
"""
