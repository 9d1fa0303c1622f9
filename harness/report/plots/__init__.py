"""Plots of a results folder as PNG and SVG.

May import `report.frames` and `report.load`.
Must not import `report.page`.
"""
