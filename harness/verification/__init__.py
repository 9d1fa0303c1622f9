"""Checks of exported models: accuracy, right results, faulty operators, dynamic axes.

May import `graph`, `accuracy` and `timing`.
Must not import `task_setup`, `pipeline` or `report`.
"""
