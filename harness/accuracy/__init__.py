"""Accuracy of one engine: datasets, preprocessing, decoding, metrics."""
