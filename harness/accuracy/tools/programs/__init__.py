"""Programs of the child processes, which import only NumPy and a tool.

Must not import the harness when they start: a tool's separate environment lacks it.
"""
