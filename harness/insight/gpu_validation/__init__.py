"""Validation on a machine with an NVIDIA GPU: steps with records, and one folder to send back."""
