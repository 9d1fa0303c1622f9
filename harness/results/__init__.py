"""Files of a results folder, each with its writer and its reader."""
