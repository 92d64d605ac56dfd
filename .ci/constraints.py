"""Write constraints.txt from `[tool.uv] constraint-dependencies` in pyproject.toml: python
.ci/constraints.py."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = (
    "# For pip (-c constraints.txt). Written by .ci/constraints.py: the constraint-dependencies of "
    "pyproject.toml."
)


def text() -> str:
    """What the file holds."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"][
        "constraint-dependencies"
    ]
    return "\n".join([HEAD, *listed, ""])


if __name__ == "__main__":
    (ROOT / "constraints.txt").write_text(text())
