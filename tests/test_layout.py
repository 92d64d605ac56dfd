"""Rows, blocks, layers, and a model that lives in a row."""

import numpy as np
import torch
from refusals import refuses
from torch import nn

from fl_lightning.core.layout import ALIGN, Binding, Layout, copy_columns
from fl_lightning.core.payload import Payload


def small():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 5, bias=False),
        nn.Linear(5, 2),
    )


def test_layers_are_modules_with_parameters_that_are_no_normalisation():
    layout = Layout(small(), head="5")
    assert layout.layers == ["0", "4", "5"]
    by_name = {b.name: b for b in layout.blocks}
    assert by_name["1.weight"].normalisation
    assert by_name["1.weight"].layer == 0
    assert by_name["5.bias"].head
    assert not by_name["4.weight"].head
    assert [b.kind for b in layout.blocks].count("buffer") == 2
    assert layout.own_names == ["1.num_batches_tracked"]
    assert all(b.start % ALIGN == 0 for b in layout.blocks)


def test_a_bound_model_reads_and_writes_its_row():
    model = small()
    layout = Layout(model, head="5")
    row, buffers = layout.read(model)
    other = row.clone()
    binding = Binding(model, layout)
    binding.bind(other, buffers)
    x = torch.randn(4, 1, 4, 4)
    model.train()
    before = row.clone()
    nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 0, 1])).backward()
    with torch.no_grad():
        for p in binding.parameters:
            p -= 0.1 * p.grad  # type: ignore[operator]
    assert torch.equal(row, before)
    assert not torch.equal(other, before)
    assert buffers[0].item() == 1
    for block in layout.blocks:
        assert torch.equal(
            model.state_dict()[block.name].flatten(), other[block.start : block.stop]
        )


def test_other_buffers_stay_with_the_client():
    """Masks, indices and flags of any type: in no row, and bound from the client's own."""

    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
            self.register_buffer("index", torch.arange(5), persistent=False)
            self.register_buffer("flags", torch.tensor([True, False]))

    model = Masked()
    layout = Layout(model, head="")
    row, buffers = layout.read(model)
    assert layout.own_names == ["mask", "index", "flags"]
    assert row.isfinite().all()
    mine = [b.clone() for b in buffers]
    Binding(model, layout).bind(row, mine)
    mine[0].zero_()
    assert model.mask.tolist() == [0.0, 0.0]  # type: ignore[union-attr,operator]
    assert model.flags.dtype == torch.bool  # type: ignore[union-attr]
    assert buffers[0].tolist() == [0.0, -torch.inf]


def test_tied_weights_shared_buffers_and_complex_numbers():
    """A classifier's weight that is another layer's is the classifier's; a shared buffer counts
    once."""
    model = small()
    model[4], model[5] = nn.Linear(12, 12, bias=False), nn.Linear(12, 12)
    model[5].weight = model[4].weight
    assert {b.name for b in Layout(model, head="5").blocks if b.head} == {"4.weight", "5.bias"}
    assert not any(b.head for b in Layout(model, head="").blocks)
    mask = torch.ones(3)
    for layer in (model[4], model[5]):
        layer.register_buffer("mask", mask)
    layout = Layout(model, head="5")
    row, buffers = layout.read(model)
    assert layout.own_names == ["1.num_batches_tracked", "4.mask"]
    Binding(model, layout).bind(row, buffers)
    assert model[4].mask is model[5].mask and model[4].mask.data_ptr() == buffers[1].data_ptr()
    model.register_parameter("filters", nn.Parameter(torch.ones(2, dtype=torch.cfloat)))
    with refuses(r"^model='filters': it is complex"):
        Layout(model, head="5")


def test_segments_join_neighbours_and_keep_layers_apart():
    layout = Layout(small(), head="5")
    everything = layout.mask(lambda b: True)
    assert len(layout.segments(everything)) == 1
    layers = layout.segments(layout.mask(lambda b: not b.normalisation), by_layer=True)
    assert [s.layer for s in layers] == [0, 1, 2]
    row = torch.arange(float(layout.size))
    into = torch.zeros_like(row)
    copy_columns(into, row, layout.segments(layout.mask(lambda b: b.name == "4.weight")))
    block = next(b for b in layout.blocks if b.name == "4.weight")
    assert torch.equal(into[block.start : block.stop], row[block.start : block.stop])
    assert into.sum() == row[block.start : block.stop].sum()


def test_a_payload_counts_what_travels_and_no_padding():
    layout = Layout(small(), head="5")
    row = torch.zeros(layout.size)
    whole = Payload(layout, row, np.ones(len(layout.blocks), dtype=bool))
    kinds = whole.by_layer.sum(axis=0)
    assert kinds.tolist() == [4 * sum(p.numel() for p in small().parameters()), 4 * 2 * 3, 0, 0]
    whole.extra["prototypes"] = torch.zeros(10, 7)
    whole.statistics["counts"] = torch.zeros(10, dtype=torch.int64)
    assert whole.by_layer.sum(axis=0).tolist() == [kinds[0], kinds[1], 80, 280]
    assert whole.by_layer[-1].tolist() == [0, 0, 80, 280]
    assert whole.layers_sent.tolist() == [True] * len(layout.layers)
    nothing = Payload(layout, row, np.zeros(len(layout.blocks), dtype=bool))
    assert nothing.by_layer.sum() == 0
    assert not nothing.layers_sent.any()
    norm = Payload(layout, row, layout.mask(lambda b: b.normalisation))
    assert norm.by_layer.sum() > 0
    assert not norm.layers_sent.any()  # a layer of which normalisation alone travels is not sent
