"""Write one HTML page on one or several run folders: `fl-train report`. Nothing here imports
torch."""
