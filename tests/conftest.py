"""Tests of plug-ins name their own modules, which are trusted here; tests of the trust itself take it away."""

import gc
import os

from hypothesis import HealthCheck, settings

# Its limits are of wall-clock, which other programs on the machine exceed.
settings.register_profile("qdq", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("qdq")
gc.set_threshold(50_000, 20, 20)  # as `qdq` does
os.environ["QDQ_TRUST_PLUGINS"] = "1"
