"""Differential privacy: bounds and noise on what leaves a client, and what they come to, by
dp-accounting."""
