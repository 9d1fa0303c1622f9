"""Run of an experiment, from its file to its results folder; `runner` runs the tasks one after the other.

`TaskPipeline` in `runner` calls the steps of one task in this order:

- `prepare`: check the experiment, load the model, calibrate, make initial placements and baselines.
- `search`: propose placements, build and time each, and write it to the journal.
- `select`: time the best placements of all searches in turns, recover accuracy, export the selected models.
- `verify`: compare the outputs of each exported model with a reference execution of its file, and score it.
- `confirm`: time the exported models against the float model on fresh builds.

An interrupted run continues: each step reads what its files in the results folder already have.
"""
