"""Timing in turns on fresh builds: noise floor, paired comparison, confirmation."""
