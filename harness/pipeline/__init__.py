"""Steps of an experiment, from a task of the plan to its table rows."""
