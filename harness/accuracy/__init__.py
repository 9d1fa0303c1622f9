"""Accuracy of an engine: labelled data, metrics with their intervals, calibration.

May import `graph`, `timing` and the contracts.
Must not import `pipeline`, `report` or a runtime.
"""
