"""Results as pandas frames of unrounded figures.

May import `report.load` and `statistics`.
Must not import `report.plots`.
"""
