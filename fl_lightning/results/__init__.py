"""What a run leaves behind: its declared columns (`columns`), its folder (`folder`), and the one
reader, `RunResult` (`result`).

A reader imports pandas where a table is read; training writes with `folder` and never does.
"""
