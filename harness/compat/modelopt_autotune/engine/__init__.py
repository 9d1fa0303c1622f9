"""State of an autotuner: its measured models, pattern searches and files."""
