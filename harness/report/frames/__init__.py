"""Results as pandas frames of unrounded figures."""
