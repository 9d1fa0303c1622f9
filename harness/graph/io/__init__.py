"""Model files: reading, writing, copies, digests, and the helper process for native calls.

May import `errors` and the worker process of `timing`.
Must not import `graph.passes`, `graph.partition` or `graph.quantize`.
"""
