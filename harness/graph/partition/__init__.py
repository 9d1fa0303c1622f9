"""Regions of a graph and the patterns that isomorphic regions share.

May import `graph.model` and `graph.rules.operator_sets`.
Must not import `graph.qdq` or `graph.quantize`.
"""
