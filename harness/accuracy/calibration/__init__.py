"""Activation ranges from data, and the PTQ baselines of other tools."""
