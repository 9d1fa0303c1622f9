"""ONNX graphs: loading, regions and patterns, quantization points, insertion of Q/DQ pairs. It alone imports onnx."""
