"""Programs of the child processes, which import NumPy and a tool alone.

Must not import the harness at their start: a tool's own environment lacks it.
"""
