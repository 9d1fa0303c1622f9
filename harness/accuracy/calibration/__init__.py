"""Activation ranges from data, and quantized models of other PTQ tools.

May import `accuracy.data` and `graph`.
Must not import `accuracy.metrics`.
"""
