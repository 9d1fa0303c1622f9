"""Recorded tables: their recording, replay of searchers, budget studies, and QDQ-Bench."""
