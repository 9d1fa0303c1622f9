"""Accuracy of an engine: labelled data, metrics with their intervals, calibration."""
