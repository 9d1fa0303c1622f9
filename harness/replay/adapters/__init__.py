"""Searchers of other libraries, one module for each library."""
