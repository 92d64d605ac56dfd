"""A client's model for use elsewhere: its weights or graph, and a file that predicts raw rows."""
