"""ONNX graphs: loading, regions, patterns, insertion points, insertion; the only importer of onnx."""
