"""Tests of plug-ins name their own modules, which are trusted here; tests of the trust itself take it away."""

import os

os.environ["QDQ_TRUST_PLUGINS"] = "1"
