"""The machinery around a search: graphs, calibration, measurement, accuracy, experiments, reports."""
