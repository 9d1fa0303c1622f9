"""Passes that prepare a model file: opset, constants, folding, static shapes.

May import `graph.io`.
Must not import `graph.rules`, `graph.qdq` or `graph.quantize`.
"""
