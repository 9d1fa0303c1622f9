"""Plots of a results folder as PNG, SVG and PDF.

May import `report.frames` and `report.load`.
Must not import `report.page`.
"""
