"""Search over Q/DQ placements: spaces, the ask/tell contract, and the algorithms behind it.

Authors of a searcher import `search.api` and `search.testing`, nothing else.
"""
