"""Analyses of one model: noise components, sensitivities, regions."""
