"""Explanations of a measured model: fused operators, pairs without effect, gain of each part.

May import `pipeline`, `selection`, `report.load` and `graph`.
Must not import `cli` or `compat`.
"""
