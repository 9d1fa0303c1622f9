"""Measurement of latency: sampling, machine noise, statistics of turns, provenance."""
