"""Checks of exported models: right results, dynamic axes, reproduction of recorded figures.

May import `pipeline`, `report.load`, `graph` and `timing`.
Must not import `cli` or `compat`.
"""
