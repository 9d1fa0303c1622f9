"""Search of one task: ask, build, sample, score, journal, tell."""
