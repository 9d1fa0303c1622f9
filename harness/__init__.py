"""Everything around a search: models, calibration, measurement, accuracy, experiments, reports.

The packages and their import order are in docs/architecture.md.
`search` must not import it.
"""
