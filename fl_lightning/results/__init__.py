"""What a run leaves behind: its declared columns (`columns`), its folder (`folder`), and the one
reader (`read`).

`read` imports pandas where a table is read; training writes with `folder` and never does.
"""
