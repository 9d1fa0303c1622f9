"""TensorRT by its command-line tool trtexec."""
