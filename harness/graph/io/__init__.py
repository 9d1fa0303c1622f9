"""Model files: reading, writing, validity checks, conversions."""
