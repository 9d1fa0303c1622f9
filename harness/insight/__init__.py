"""Explanation of a measured model: fused operators, effect of each part, sensitivities, noise."""
