"""Selection of the best placements: paired timing, racing, final selection, confirmation."""
