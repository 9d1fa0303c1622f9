"""Checks that the prepared model computes what the file computes."""
