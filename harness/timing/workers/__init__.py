"""Engines in worker processes: isolation, limits, scheduling of builds and timings."""
