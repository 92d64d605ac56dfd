"""Errors, files, logs, random numbers, processes and devices: imports nothing of the other
rooms."""
