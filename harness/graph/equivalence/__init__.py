"""Comparison of the prepared model with its file, by running both.

May import `graph.io` and `graph.passes`.
Must not import `graph.quantize`.
"""
