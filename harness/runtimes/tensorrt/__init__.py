"""TensorRT by its Python API: library, builds, timing cache, engines, inspection.

May import `runtimes.cuda` and `graph`.
Must not import `runtimes.trtexec`.
"""
