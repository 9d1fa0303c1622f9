"""Which decoder and preprocessing a detector wants; see `harness.evaluators.layout`."""

from harness.evaluators.layout import decoder_of

__all__ = ["decoder_of"]
