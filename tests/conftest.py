"""Tests of plug-ins name their own modules, which are trusted here; tests of the trust itself take it away."""

import gc
import os

gc.set_threshold(50_000, 20, 20)  # as `qdq` does
os.environ["QDQ_TRUST_PLUGINS"] = "1"
