"""Q/DQ pairs: the space of placements, insertion into a model, and reading pairs back from a file.

May import the other packages of `graph`, and `search.space`.
Must not import anything that builds or times an engine.
"""
