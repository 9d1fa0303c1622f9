"""Files of a results folder: journals, exported models, ownership, completion and termination."""
