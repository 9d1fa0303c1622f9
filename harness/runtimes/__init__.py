"""Benchmarkers, one module or package for each runtime; the contract is `harness.plugins.api.Benchmarker`."""
