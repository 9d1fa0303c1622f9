"""ONNX graphs: loading, regions and patterns, quantization points, insertion of Q/DQ pairs; the only importer of onnx.

May import `errors`, `paths` and the packages below it in the import contract (pyproject.toml).
Must not import a runtime, the configuration or anything that builds or times an engine.
"""
