"""Labelled data: images, arrays, masks, preprocessing and decoding."""
