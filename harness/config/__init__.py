"""Experiment file to frozen `Experiment`, and its plan of tasks."""
