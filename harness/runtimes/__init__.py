"""Benchmarkers, one module or package for each runtime; the contract is `harness.api.Benchmarker`.

May import `graph`, `timing` and the runtime's own library, the latter inside functions.
Must not import another benchmarker, `pipeline` or `report`.
"""
