"""Heatmaps of relation and split, drawn with Pillow."""
