"""ONNX graphs: loading, regions, patterns, insertion points, insertion; the only importer of onnx.

The way of a model through this package, and who knows what:

- `load` (with `cleaning`) makes a file a `model`: checked, cleaned, of static shapes. `build` makes models by code.
- `regions` (with `cutting`) cuts it, `patterns` tells which regions are isomorphic, `summary` says so to people.
- `dialects` are how runtimes want their Q/DQ; `legality` has the rules, `operators` the kinds of operators in them,
  `points` what they allow, and `space` makes a space of placements of it.
- `insert` (with `encoding`) makes a placement a model again, `casting` one at FP16 or BF16, and `diff` reads back which
  edges are quantized.
- `importer` reads a Q/DQ model that somebody else made as a placement, `asked` and `declared` what its file says, and
  `bypass` takes pairs out of it; `tensorrt_file` knows what TensorRT refuses.
- `cache` keeps the best schemes of patterns across models, `cache_file` as YAML; `files` and `exchange` hand models on.
"""
