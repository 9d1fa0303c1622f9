"""Errors, text, paths, files, progress and statistics that every package uses."""
