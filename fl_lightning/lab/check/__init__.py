"""Checks that a user's method behaves as every method must: `fl-train check-method`."""
