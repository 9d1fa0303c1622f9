"""Which decoder and preprocessing a detector wants; see `harness.accuracy.data.detector_layout`."""

from harness.accuracy.data.detector_layout import decoder_of

__all__ = ["decoder_of"]
