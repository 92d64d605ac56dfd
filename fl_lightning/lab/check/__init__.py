"""What every method must hold, tried on one that somebody has written: `fl-train check-method`."""
