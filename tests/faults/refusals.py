"""Input that must be refused."""

import pytest

from fl_lightning.foundation.errors import BadInput


def refuses(pattern):
    """A context that must end with BadInput whose line holds `pattern`."""
    return pytest.raises(BadInput, match=pattern)


def refused_line(answer):
    """The one line of a call (exit code, stdout, stderr) that was refused as bad input."""
    code, out, err = answer
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("fl-train: error: ")
    return err.removeprefix("fl-train: error: ").rstrip()
