"""The harness of this folder is made of scripts: they are found as scripts find each other."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
