"""Readers of results folders."""
