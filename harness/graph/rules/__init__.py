"""Placement rules: the inputs and outputs that may have Q/DQ pairs in the dialect of a runtime.

May import `graph.model` and `graph.partition`.
Must not import a runtime: a dialect is data.
"""
