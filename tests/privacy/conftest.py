"""Lets these tests import the table of quick methods."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "methods"))
