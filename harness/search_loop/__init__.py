"""The loop of one search: ask, build, sample, score, journal, tell."""
