"""Constants and nodes of Q/DQ pairs: scales, quantized weights, encoded variants of each node.

May import `graph.model` and `graph.rules`.
Must not import `graph.qdq`, which assembles models from these parts.
"""
