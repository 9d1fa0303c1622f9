"""Searches by other tools, timed and counted like searchers; see `harness.plugins.api.ExternalSearcher`."""
