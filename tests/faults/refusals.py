"""Input that must be refused."""

import pytest

from fl_lightning.foundation.errors import BadInput


def refuses(pattern):
    """A context that must end with BadInput whose line holds `pattern`."""
    return pytest.raises(BadInput, match=pattern)
