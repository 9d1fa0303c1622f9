"""Which decoder and preprocessing a detector wants; see `harness.accuracy.data.detector_layout`."""

from harness.accuracy.data.detector_layout import suggest_decoder

__all__ = ["suggest_decoder"]
