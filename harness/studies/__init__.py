"""Replay tables and studies of searchers on them: recording, replay, budget ablations.

May import `pipeline`, `selection` and `report`.
Must not import `cli` or `compat`.
"""
