"""Suspicious columns in the silos' tables: `fl-train check-data`."""
