"""TensorRT by its command-line tool trtexec: arguments, process, exported times.

May import the options and the inspection of `runtimes.tensorrt`.
Must not load the TensorRT library into this process.
"""
