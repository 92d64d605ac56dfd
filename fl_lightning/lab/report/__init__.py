"""One HTML page on one or several run folders: what `fl-train report` writes. Nothing here imports
torch."""
