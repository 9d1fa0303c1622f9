"""Models and data made by code, so that nothing needs a download."""
