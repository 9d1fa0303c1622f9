"""Tables as Markdown, CSV, LaTeX and terminal text, with captions and notes.

May import `report.frames` and `report.load`.
Must not compute a figure that no frame has.
"""
