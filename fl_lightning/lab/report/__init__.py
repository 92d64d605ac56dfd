"""One HTML page on one or several run folders: what `fl-train report` writes. Nothing here imports
torch."""

from fl_lightning.lab.report.page import MARKER, render
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import load, run_folders

__all__ = ["MARKER", "RunResult", "load", "render", "run_folders"]
