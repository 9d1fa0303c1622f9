"""Files of a results folder: journals, exported models, ownership, completion and termination.

May import `config`, the contracts and the engine interface of `timing`.
Must not import `pipeline`, `selection` or `report`.
"""
