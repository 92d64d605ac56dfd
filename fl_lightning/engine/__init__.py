"""Runs the rounds of a federation: draws cohorts, visits clients, scores models, records
results."""
