"""Plots of a results folder as PNG and SVG."""
