"""Show how the golden runs' numbers differ from those that are kept; with `--write`, keep the new ones.

python tests/golden/regenerate.py [--write]
"""

from __future__ import annotations

import json
import sys

import golden


def main(write: bool) -> int:
    """Print every difference, run by run; returns how many runs differ."""
    changed = 0
    for name, settings in golden.runs().items():
        new = golden.numbers(settings)
        lines = list(golden.differences(golden.kept(name), new))
        changed += bool(lines)
        print(f"{name}: {len(lines)} differences" if lines else f"{name}: as kept")
        print(*(f"  {line}" for line in lines), sep="\n", end="\n" if lines else "")
        if write and lines:
            golden.path(name).write_text(json.dumps(new, indent=1) + "\n")
    for path in golden.FOLDER.glob("*.json"):
        if path.stem not in golden.runs():
            changed += 1
            print(f"{path.stem}: no such run any more")
            if write:
                path.unlink()
    print(f"{changed} of {len(golden.runs())} runs differ" + ("; written" if write else ""))
    return changed


if __name__ == "__main__":
    changed = main("--write" in sys.argv[1:])
    sys.exit(bool(changed) and "--write" not in sys.argv[1:])
