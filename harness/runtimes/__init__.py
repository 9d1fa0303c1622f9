"""Latency of one engine, one runtime a file; the contract is in harness.api."""
