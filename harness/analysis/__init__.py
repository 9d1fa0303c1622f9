"""Analyses of one model: components of noise, sensitivities, regions.

May import `studies`, `pipeline` and `graph`.
Must not import `cli` or `compat`.
"""
