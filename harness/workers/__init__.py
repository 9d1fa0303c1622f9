"""Processes in which native code runs: sandbox, pool, locks, inference in a child, Ray."""
