"""Parts that all NVIDIA runtimes share: the device, its memory, its clocks, time by CUDA events.

May import cuda-python and NVML, inside functions.
Must not import a runtime.
"""
