"""Contracts of plug-ins, their registry, and checks of their parameters."""
