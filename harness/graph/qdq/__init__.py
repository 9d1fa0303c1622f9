"""Q/DQ pairs: the space of placements, insertion, and reading pairs back."""
