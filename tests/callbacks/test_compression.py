"""Quantisation and sparsification: unbiased, remembered, and counted as they would travel."""

from itertools import pairwise

import pytest
import torch
from reckoning import seeded
from refusals import refuses
from safetensors.torch import load_file

from fl_lightning.callbacks.base import Transform
from fl_lightning.callbacks.compression import Quantize, TopK, quantised
from fl_lightning.core.layout import copy_columns
from fl_lightning.methods.fedavg import FedAvg


@pytest.mark.parametrize("bits", [8, 16])
def test_quantisation_is_unbiased_on_its_grid(bits):
    x = torch.randn(200, generator=seeded())
    draws = seeded(1)
    many = torch.stack([quantised(x, bits, draws) for _ in range(2000)])
    step = x.abs().max() / (2 ** (bits - 1) - 1)
    torch.testing.assert_close(many / step, (many / step).round(), rtol=0, atol=1e-2)
    assert ((many - x).abs() <= step * 1.001).all()
    # five standard errors of at most step / 2
    assert (many.mean(0) - x).abs().max() < 5 * step / 2 / 2000**0.5
    assert torch.equal(quantised(torch.zeros(3), bits, draws), torch.zeros(3))


def passed(make_run, make_client, transform):
    """A client that has trained a little, and its download and upload as they arrive."""
    run = make_run(FedAvg(), callbacks=[transform])
    client = make_client(run, 1, round=3)
    draws = seeded()
    down = client.payload
    down.vector = down.vector + 0.1 * torch.randn(client.layout.size, generator=draws)
    transform.on_download(client, down)
    client["model"].add_(torch.randn(client.layout.size, generator=draws))
    up = run.method.upload(client, down)
    transform.on_upload(client, up)
    return client, down, up


def test_bytes_are_those_that_would_travel(make_run, make_client):
    """PlainNet: 64*16, 16, 16*10 and 10 numbers in four tensors."""
    sizes = [1024, 16, 160, 10]
    full = 4 * sum(sizes)

    def travelled(transform):
        _, down, up = passed(make_run, make_client, transform)
        return int(down.by_layer.sum()), int(up.by_layer.sum())

    assert travelled(Transform()) == (full, full)
    eight = sum(sizes) + 4 * 4
    assert travelled(Quantize()) == (eight, eight)
    assert travelled(Quantize(bits=16, direction="upload")) == (full, 2 * sum(sizes) + 4 * 4)
    assert travelled(Quantize(direction="download")) == (eight, full)
    assert travelled(TopK(share=0.1)) == (full, 8 * (102 + 2 + 16 + 1))


@pytest.mark.parametrize("bits", [8, 16])
def test_what_arrives_lies_on_the_grid_around_the_servers_copy(make_run, make_client, bits):
    client, down, up = passed(make_run, make_client, Quantize(bits=bits))
    known = client.state.received["model"]
    assert not torch.equal(up.vector, client["model"])
    for b in client.layout.blocks:
        change, wanted = ((v - known)[b.start : b.stop] for v in (up.vector, client["model"]))
        step = wanted.abs().max() / (2 ** (bits - 1) - 1)
        assert ((change - wanted).abs() <= 1.01 * step + 1e-6).all()
    draws = seeded()
    sent = client.group.initial + 0.1 * torch.randn(client.layout.size, generator=draws)
    at = client.layout.blocks[0]
    own = client.generator("quantize download")  # of this client and round
    wanted = known[: at.stop] + quantised(sent[: at.stop] - known[: at.stop], bits, own)
    assert torch.equal(down.vector[: at.stop], wanted)
    numbers = int(client.layout.sizes.sum())
    assert client.flops == 2 * 9 * numbers


def test_running_statistics_travel_whole(make_run, make_client):
    """A step of the grid may be greater than a small variance: it could end below 0, and outputs as
    NaN."""
    run = make_run(FedAvg(), "norm", callbacks=[Quantize()])
    client = make_client(run, 1, round=3)
    block = next(b for b in client.layout.blocks if b.name.endswith("running_var"))
    client["model"].add_(torch.randn(client.layout.size, generator=seeded()))
    client["model"][block.start : block.stop] = torch.logspace(-6, 2, block.size)
    up = run.method.upload(client, client.payload)
    Quantize().on_upload(client, up)
    assert torch.equal(
        up.vector[block.start : block.stop], client["model"][block.start : block.stop]
    )
    assert not torch.equal(up.vector, client["model"])
    index = client.layout.blocks.index(block)
    assert up.block_bytes[index] == 4 * block.size


@pytest.mark.slow
def test_a_hypernetwork_does_not_learn_what_quantisation_errs(fit):
    """Without training, what a client has changed since it received its model is nothing."""
    still = (
        "--method pfedhn --method.hyper_decay 0 --federation.local_epochs 0 --callbacks quantize"
    )
    still += " --callbacks.quantize.direction download --callbacks checkpoint"
    states = []
    for rounds in (1, 2):
        folder = fit(f"{rounds}", still, f"--federation.rounds {rounds}") / "checkpoints"
        states.append(load_file(folder / f"server-round-{rounds:05}.safetensors"))
    names = [name for name in states[0] if "hypernetwork" in name]
    assert names and all(torch.equal(states[0][name], states[1][name]) for name in names)


def test_nothing_is_lost_for_good(make_run, make_client):
    """Error feedback: while a client stands still, its server copy reaches it, the largest changes
    first."""
    transform = TopK(share=0.1)
    client, _, upload = passed(make_run, make_client, transform)
    received = client.state.received["model"]
    columns = client.layout.segments(upload.sent)
    gaps = []
    for _ in range(12):
        upload = client.run.method.upload(client, client.payload)
        transform.on_upload(client, upload)
        copy_columns(received, upload.vector, columns)
        gaps.append(
            float(
                torch.cat([(client["model"] - received)[s.start : s.stop] for s in columns]).norm()
            )
        )
    assert gaps[0] > 0
    assert all(later < earlier or later == 0 for earlier, later in pairwise(gaps))
    assert gaps[-1] < 1e-6


def test_a_second_way_to_compress_is_refused(make_run):
    run = make_run(FedAvg(), callbacks=[Quantize(), TopK()])
    with refuses(r"callbacks\.topk: it cannot run with quantize"):
        run.callbacks[1].on_fit_start(run)


@pytest.mark.parametrize(
    "arguments, key", [({"bits": "inf"}, "bits"), ({"direction": "up"}, "direction")]
)
def test_arguments_that_cannot_work(arguments, key):
    with refuses(rf"callbacks\.quantize\.{key}="):
        Quantize(**arguments)
