"""Searches of other tools, timed and counted as ours are: the contract is `harness.api.ExternalSearcher`."""
