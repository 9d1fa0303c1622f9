"""Simulated packages; regular ones, because a namespace package would lose to an installed `cuda.bindings`."""
