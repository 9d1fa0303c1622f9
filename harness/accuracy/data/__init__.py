"""Labelled data: images, arrays and masks, with preprocessing and decoding.

May import `registry`, `paths` and `errors`.
Must not import `accuracy.metrics`.
"""
