"""Studies: many runs over a grid of methods, settings and seeds, run and compared as one thing.

A command of `api.py` begins in one module here, which calls the others:

- study: `launch` (the file: `studyfile`, `grid`, `part`; the runs: `runner`, `workers`, `together`,
  `board`; what must not change meanwhile: `samples`, `code`)
- compare: `comparison` (`scores`, `groups`, `compare` or `clients`, then `tables`, `listing`,
  `picture`)
- tune: `tuning` (`space`, `trials`, `tuned`; for tables, `chosen`)
- reproduce: `reproduction` (`papers`, `reproduce`)
- archive: `packing` (`archive`)

All read and write a `folder`.
"""
