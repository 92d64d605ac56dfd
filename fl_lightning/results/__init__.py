"""Results of runs: declarations of columns (`columns`), the writer of run folders (`folder`), and
their reader, `RunResult` (`result`).

Only readers import pandas, when a table is read; training never does.
"""
