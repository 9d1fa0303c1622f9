"""Validation on a machine with an NVIDIA GPU: steps with records, and one folder to send back.

May import everything below `cli`.
Must not be imported by any other package.
"""
