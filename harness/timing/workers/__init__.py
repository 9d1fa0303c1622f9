"""Engines in worker processes: isolation, limits, scheduling of builds and timings.

May import `timing`, `config` and the contracts.
Must not import a runtime: plug-ins are loaded by name.
"""
