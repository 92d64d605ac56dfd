"""One HTML page on one or several run folders: what `fl-train report` writes. Nothing here imports torch."""

from fl_lightning.report.page import MARKER, render
from fl_lightning.results.read import Run, load, run_folders

__all__ = ["MARKER", "Run", "load", "render", "run_folders"]
