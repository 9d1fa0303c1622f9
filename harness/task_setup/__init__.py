"""Set-up of a task: model, data, placements to start from, baselines, searchers, and the checks before a run.

May import `report.load`, `selection`, `verification` and every package below them.
Must not import `pipeline`, which runs what is set up here.
"""
