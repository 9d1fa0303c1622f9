"""NVIDIA's compiler of TensorRT for RTX as a judge of models, without a GPU and without any timing.

May import `graph` and `timing`.
Must not import other runtimes.
"""
