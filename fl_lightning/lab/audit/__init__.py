"""Measure what finished runs reveal about their clients' data: `fl-train audit`."""
