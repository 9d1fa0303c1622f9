"""Timing of engines: sampling, machine noise, comparison in turns, provenance.

May import `config`, `statistics` and the journal of `results_dir`.
Must not import `graph`, a runtime or anything that knows of searches.
"""
