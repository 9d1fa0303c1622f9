"""Quantize, build and evaluate by spec files, for users who do not search."""
