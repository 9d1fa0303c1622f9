"""Recovery of accuracy at a placement, without a change of its Q/DQ pairs.

May import `accuracy.calibration`, `accuracy.metrics` and `graph`.
"""
