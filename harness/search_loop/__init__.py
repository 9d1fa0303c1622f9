"""Loop of one search: ask, build, sample, score, journal, tell.

May import `timing`, `results_dir`, `config` and `search`.
Must not import `graph`, `selection` or `pipeline`: callers pass the function that runs a trial.
"""
