"""Set-up of a task: model, data, initial placements, baselines, searchers, and the checks before a run.

May import `report.load`, `selection`, `verification` and every package below them.
Must not import `pipeline`, which runs the tasks.
"""
