"""Models and data made by code, so that nothing needs a download."""

from harness.zoo.catalog import model_names, write_model

__all__ = ["model_names", "write_model"]
