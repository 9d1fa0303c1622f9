"""Steps of an experiment, from a task of the plan to its exported and confirmed models.

May import every package below `compat`, `studies`, `analysis` and `explain`.
Must not import those four or `cli`.
"""
