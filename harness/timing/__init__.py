"""Sampling, isolation, confirmation, statistics and provenance."""
