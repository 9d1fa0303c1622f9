"""Placement rules: which tensors may carry Q/DQ pairs in the dialect of a runtime."""
