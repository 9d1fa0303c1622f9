"""Selection of the best placements: paired timing, racing, final selection, confirmation.

May import `search_loop`, `timing` and, for the export of models, `pipeline`.
Must not import `report` or `cli`.
"""
