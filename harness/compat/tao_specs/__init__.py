"""Quantization, engine builds and evaluation by spec files, for users who do not search.

May import `accuracy`, `graph`, `runtimes` by name, and `pipeline`.
Must not import `compat.modelopt_autotune`.
"""
