"""Reports of a results folder: pandas frames, tables, plots and the HTML page."""
