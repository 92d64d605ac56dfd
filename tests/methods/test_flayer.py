"""FLAYER: own top layers by their accuracy, rates by layer, and uploads of what has changed
most."""

import torch
from torch import nn
from torch.testing import assert_close

from fl_lightning.core import Layout
from fl_lightning.methods.flayer import layer_rates, most_changed


class Net(nn.Module):
    """A convolution with kernels of 2 x 2, a matrix and a classifier."""

    head = "out"

    def __init__(self):
        super().__init__()
        self.conv, self.body, self.out = nn.Conv2d(1, 2, 2), nn.Linear(5, 4), nn.Linear(4, 3)


def test_rates_by_hand():
    """1 in the first layer; in the second of three half the mean of ln(1 + 1/norm); the last as
    given."""
    layout = Layout(Net(), "out")
    gradient = torch.zeros(layout.size)
    blocks = {b.name: b for b in layout.blocks}
    for name, norm in (
        ("body.weight", 2.0),
        ("body.bias", 0.5),
        ("conv.weight", 3.0),
        ("out.bias", 1.0),
    ):
        gradient[blocks[name].start] = -norm
    rates = layer_rates(layout, gradient, 0.3)
    want = 1 + 0.5 * (torch.log(torch.tensor(1.5)) + torch.log(torch.tensor(3.0))) / 2
    for name, block in blocks.items():
        expected = {"conv": 1.0, "body": float(want), "out": 0.3}[name.partition(".")[0]]
        assert_close(rates[block.start : block.stop], torch.full((block.size,), expected))
    greater = layer_rates(layout, gradient, 0.3, 20.0)
    factor = {"conv": 1.0, "body": 20.0, "out": 1.0}
    for name, block in blocks.items():
        columns = slice(block.start, block.stop)
        assert_close(greater[columns], factor[name.partition(".")[0]] * rates[columns])


def test_what_is_uploaded_by_hand():
    """Of six parameters the first keeps 1 number in each kernel of four (a tenth at least), the
    bias 1 of 2, the fourth half of its numbers; matrices and the classifier are whole."""
    layout = Layout(Net(), "out")
    change = torch.zeros(layout.size)
    blocks = {b.name: b for b in layout.blocks}
    for name, values in (
        ("conv.weight", [0.1, -0.9, 0.2, 0.3, 0.5, 0.4, 0.1, 0.2]),
        ("conv.bias", [0.1, -0.2]),
        ("body.bias", [4.0, -3.0, 1.0, 2.0]),
    ):
        change[blocks[name].start : blocks[name].stop] = torch.tensor(values)
    mask = most_changed(layout, change)
    kept = {name: mask[b.start : b.stop].int().tolist() for name, b in blocks.items()}
    assert kept.pop("conv.weight") == [0, 1, 0, 0, 1, 0, 0, 0]
    assert kept.pop("conv.bias") == [0, 1]
    assert kept.pop("body.bias") == [1, 1, 0, 0]
    assert all(all(flags) for flags in kept.values())
    layout = Layout(nn.Sequential(nn.Conv2d(1, 1, 3), nn.Linear(2, 2)), "1")
    mask = most_changed(layout, torch.arange(float(layout.size)))
    assert mask[:9].tolist() == [False] * 8 + [True]  # nine tenths of nine numbers
