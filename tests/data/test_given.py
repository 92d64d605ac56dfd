"""Arrays that a script hands over, as they are kept for a run."""

import numpy as np
import pytest
from refusals import refuses

from fl_lightning.data.given import FILE, keep

LABELS = np.arange(60) % 2


def test_times_are_named_and_names_in_two_spellings_are_one(tmp_path, capsys):
    x = np.stack([1.76e9 + np.arange(60), np.arange(60)], 1)
    names = np.array(["Zu\u0308rich", "Z\u00fcrich", "Bern"] * 20)
    place, settings = keep((x, LABELS, names), tmp_path)
    assert settings["federation"]["clients"] == 2
    assert set(np.load(place / FILE)["client_train"]) == {"Bern", "Z\u00fcrich"}
    assert (
        "data: feature 0 of x (train): of 60 different values 1 are left in 32 bits"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("shape", [(3, 32, 32), (16, 28, 20)])
def test_channels_that_may_be_first_are_refused(shape, tmp_path):
    with refuses("its channels may be first: put them last, or give a Dataset"):
        keep((np.zeros((60, *shape), np.float32), LABELS), tmp_path)
    place, _ = keep((np.zeros((60, 32, 28, 3), np.float32), LABELS), tmp_path)
    assert np.load(place / FILE)["x_train"].shape == (60, 3, 32, 28)
