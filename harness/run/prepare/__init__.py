"""Set-up of a task: model, data, initial placements, baselines, searchers, and the checks before a run."""
