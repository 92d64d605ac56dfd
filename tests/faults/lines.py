"""Lines of `fl-train` in this process."""

import shlex

from fl_lightning.cli import main


def run_line(line):
    """The exit code of a line, without `fl-train`."""
    return main(shlex.split(line))
