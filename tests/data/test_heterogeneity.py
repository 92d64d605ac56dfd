import numpy as np
import pytest
import torch
from reckoning import seeded

from fl_lightning.data import heterogeneity
from fl_lightning.data.federated import FederatedData
from fl_lightning.data.part import Samples


def federated(x, y, owners, classes, vocabulary=0):
    """Client i holds the samples that `owners` gives it."""
    shares = [np.flatnonzero(np.array(owners) == c) for c in range(max(owners) + 1)]
    samples = Samples(x, torch.tensor(y), torch.zeros(x.shape[1]), torch.ones(x.shape[1]))
    none, names = [np.zeros(0, np.int64)] * len(shares), [str(k) for k in range(classes)]
    return FederatedData(
        samples, samples, (shares, none, shares), names, [0.0] * len(shares), vocabulary=vocabulary
    )


def test_label_mixes_by_hand():
    """Client 0 has class 0 alone, 1 has both alike, 2 has class 1 alone."""
    data = federated(torch.zeros(8, 3), [0, 0, 0, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 2, 2], 2)
    pairs = heterogeneity.measure(data).pairs
    middle = np.sqrt(
        0.5 * np.log2(1 / 0.75) + 0.5 * (0.5 * np.log2(0.5 / 0.75) + 0.5 * np.log2(0.5 / 0.25))
    )
    assert pairs["jensen_shannon"] == pytest.approx(
        np.array([[0, middle, 1], [middle, 0, middle], [1, middle, 0]])
    )
    half = np.sqrt(1 - np.sqrt(0.5))
    assert pairs["hellinger"] == pytest.approx(
        np.array([[0, half, 1], [half, 0, half], [1, half, 0]])
    )
    within = pairs["feature_shift_within"]
    assert not pairs["feature_shift"].any() and not np.nan_to_num(within).any()
    # 0 and 2 share none
    assert np.isnan(within).tolist() == [[False, False, True], [False] * 3, [True, False, False]]


def test_a_shift_of_inputs_is_in_deviations_and_not_made_by_label_mixes():
    draws = seeded(0)
    y = torch.arange(400) % 2
    x = torch.randn(400, 6, generator=draws) + 8 * y[:, None]  # two classes far from each other
    mixed = [0] * 200 + [1] * 200
    alike = heterogeneity.measure(federated(x, y.tolist(), mixed, 2)).summary()
    assert alike["heterogeneity_feature_shift"] < 0.25
    skewed = heterogeneity.measure(federated(x, y.tolist(), y.tolist(), 2)).summary()
    assert skewed["heterogeneity_feature_shift"] > 1  # half a spread of 2 to either side
    assert "heterogeneity_feature_shift_within" not in skewed  # no class in common
    moved = x.clone()
    moved[200:] += 8
    shifted = heterogeneity.measure(federated(moved, y.tolist(), mixed, 2)).summary()
    assert (
        shifted["heterogeneity_feature_shift_within"]
        > 0.6
        > 3 * alike["heterogeneity_feature_shift_within"]
    )
    assert shifted["heterogeneity_jensen_shannon"] == alike["heterogeneity_jensen_shannon"] == 0


@pytest.mark.parametrize(
    "sizes, gini", [([5, 5, 5], 0), ([0, 0, 9], 2 / 3), ([1, 3], 0.25), ([0], 0)]
)
def test_the_gini_coefficient(sizes, gini):
    assert heterogeneity.gini(np.array(sizes)) == pytest.approx(gini)
