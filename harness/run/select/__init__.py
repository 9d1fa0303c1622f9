"""Selection among the placements of all searches, and export of the selected models."""
