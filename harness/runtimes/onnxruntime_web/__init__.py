"""ONNX Runtime Web: its WebAssembly build in Node.js or in headless Chromium, one child process for each engine.

Must not import the Python package of ONNX Runtime.
"""
