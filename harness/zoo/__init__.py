"""Models and data made by code, so that nothing needs a download."""

from harness.zoo.catalog import names, write

__all__ = ["names", "write"]
