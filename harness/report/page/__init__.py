"""The HTML page of a results folder."""
