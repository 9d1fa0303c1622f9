"""HTML page of a results folder: one file that opens offline.

May import `report.frames`, `report.tables` and `report.plots`.
Must not fetch anything from the network.
"""
