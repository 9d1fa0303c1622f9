"""Check of models by NVIDIA's compiler of TensorRT for RTX, without a GPU and without timing.

May import `graph` and `timing`.
Must not import other runtimes.
"""
