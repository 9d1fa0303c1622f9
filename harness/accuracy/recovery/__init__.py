"""Recovery of accuracy for a given placement, without changes of the positions of its Q/DQ pairs.

May import `accuracy.calibration`, `accuracy.metrics` and `graph`.
"""
