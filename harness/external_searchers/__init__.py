"""Searches by other tools, timed and counted like searchers; the contract is `harness.api.ExternalSearcher`.

May import the contracts and `search`.
Must not import the tool itself: it runs in a child process.
"""
