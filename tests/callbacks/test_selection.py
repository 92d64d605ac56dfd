"""Layer selection: the bound in closed form, the searches, and the invariants of card 1.36."""

import math

import numpy as np
import pytest
import torch
from classes import KAPC, FedAvg
from reckoning import seeded
from refusals import refuses

from fl_lightning.callbacks.selection import (
    LayerSelection,
    LayerSizes,
    _log_m,
    _sizes,
    bound_holds,
    search,
)
from fl_lightning.core.layout import Layout
from fl_lightning.models.resnet18 import ResNet18
from fl_lightning.results.folder import RunFolder

SELECTION = "--callbacks layerselection --callbacks.layerselection"


def test_the_bounds_sums_in_closed_form():
    """M = tau_L/(2 B_L) + sum_k tau_{L-k} prod_{j<=k} sqrt(n_{L+1-j}) / (2 B_{L-k}), written out
    for three layers."""
    tau, B = np.array([0.3, 0.5, 0.2]), np.array([2.0, 1.0, 4.0])
    sizes = LayerSizes(columns=np.array([9.0, 16.0, 25.0]), outputs=np.array([4.0, 5.0, 6.0]))
    by_hand = 0.2 / 8 + 0.5 * 5 / 2 + 0.3 * 5 * 4 / 4
    assert math.isclose(math.exp(_log_m(3, B, tau, sizes)), by_hand, rel_tol=1e-12)
    left = 3 * 5 * (0.5 / 2 + 0.3 * 4 / 4) / (2 * 7 * 2)  # L d_2 M(2) / (2 c 2), equal norms
    assert bound_holds(2, B, tau, B, tau, sizes, 7) == (left <= by_hand)
    # norms that have grown: 10^6 times the left side / 100
    assert bound_holds(2, B, tau, 100 * B, tau, sizes, 7) is False


def test_resnet18_keeps_nineteen_layers():
    """With equal norms the bound holds up to 19, fails at 20 and holds again at 21, the paper's
    'first 19 layers'."""
    layout = Layout(ResNet18(10, (3, 32, 32)), "fc")
    sizes = _sizes(layout)
    ones = np.ones(21)
    fits = [bound_holds(o, ones, ones, ones, ones, sizes, 10) for o in range(1, 22)]
    assert fits == [True] * 19 + [False, True]


@pytest.mark.parametrize(
    "omega, how, step_back, largest, answer",
    [
        (20, "swapped", False, "L-1", 19),  # violated: shrink until it holds
        (19, "swapped", False, "L-1", 20),  # holds: grow until violated; so it alternates 20, 19
        (5, "swapped", True, "L-1", 19),
        (20, "swapped", True, "L-1", 19),
        (19, "printed", False, "L-1", 1),  # runs to the end
        (20, "printed", False, "L-1", 20),
        (21, "swapped", False, "L", 21),  # L satisfies the bound: it stays
        (20, "printed", False, "L", 21),  # violated, so it grows until the bound holds: all layers
        (20, "printed", True, "L", 21),
    ],
)
def test_searches_on_the_pattern_of_resnet18(omega, how, step_back, largest, answer):
    assert search(omega, [True] * 19 + [False, True], how, step_back, largest) == answer


@pytest.mark.parametrize("largest, learns", [("L-1", False), ("L", True)])
def test_bounds_are_learnt_again_only_where_all_layers_may_be_sent(
    make_run, make_client, monkeypatch, largest, learns
):
    """Where the bound always holds, [1, L] sends everything every other round, and B and tau follow
    (Alg. 4)."""
    monkeypatch.setattr("fl_lightning.callbacks.selection.bound_holds", lambda *args: True)
    selection = LayerSelection(mu=None, largest=largest)
    run = make_run(KAPC(), callbacks=[selection])
    L = len(run.layer_names)
    omegas, bounds = [], []
    for t in range(1, 6):
        client = make_client(run, 0, round=t)
        selection.on_download(client, client.payload)
        client["model"].mul_(1.1)
        selection.on_upload(client, run.method.upload(client, client.payload))
        client.state.rounds += 1
        omegas.append(int(client.memory["selection.omega"]))
        bounds.append(
            torch.cat([client.memory["selection.B"], client.memory["selection.tau"]]).clone()
        )
    assert omegas == ([L - 1, L, L - 1, L, L - 1] if learns else [L - 1] * 5)
    assert torch.equal(bounds[0], bounds[1])
    assert (
        torch.equal(bounds[1], bounds[2]) is not learns
        and torch.equal(bounds[0], bounds[-1]) is not learns
    )
    # so is whether the classifier was ever sent
    assert bool(client.memory["selection.received"].all()) is learns
    with refuses(r"layerselection\.largest.*one of L-1, L"):
        LayerSelection(largest="all")


def test_the_norms_that_the_bound_goes_by(make_run, make_client):
    """Of each layer's own parameters; the distance from what was received, 0 where nothing was."""
    client = make_client(make_run(KAPC(), net="norm", callbacks=[LayerSelection()]), 0)
    layout, L = client.layout, len(client.layout.layers)
    client["model"].add_(torch.randn(layout.size, generator=seeded(0)))
    client.payload.sent &= layout.layer_of != 1
    weight, distance = LayerSelection()._norms(client)
    for layer in range(L):
        own = [
            b
            for b in layout.blocks
            if b.layer == layer and b.kind == "parameter" and not b.normalisation
        ]
        w, s = (
            torch.cat([v[b.start : b.stop] for b in own]).double()
            for v in (client["model"], client.group.initial)
        )
        assert weight[layer] == pytest.approx(float(w.norm()))
        assert distance[layer] == pytest.approx(0.0 if layer == 1 else float((w - s).norm()))
    sizes = [
        int(layout.sizes[layout.is_layer_weight & (layout.layer_of == layer)].sum())
        for layer in range(L)
    ]
    assert client.flops == 2 * sum(sizes) + 3 * (sum(sizes) - sizes[1])


def test_layers_in_which_ones_own_weight_is_great_are_not_sent(make_run, make_client):
    """Compared in 32 bits, as the weights are kept: a weight that is mu there is not below it."""
    run = make_run(KAPC(), net="norm", callbacks=[LayerSelection()])
    weights = np.array([0.7, 0.69999, 0.9], dtype=np.float32)
    for mu, sent in (
        (0.7, [False, True, False]),
        (0.0, [False] * 3),
        (2.0, [True] * 3),
        (None, [True] * 3),
    ):
        client = make_client(run, 0)
        client.payload.own_weights = weights
        LayerSelection(mu=mu).on_download(client, client.payload)
        shared = client.group.down_mask
        assert np.array_equal(client.payload.sent, shared & np.array(sent)[client.layout.layer_of])
        assert client.payload.layers_sent.tolist() == sent
    client = make_client(run, 0)
    with refuses(r"callbacks\.layerselection\.mu=0\.7.*null"):
        LayerSelection().on_download(client, client.payload)


def test_a_relation_without_layers_is_refused(make_run):
    run = make_run(FedAvg(), callbacks=[LayerSelection()])
    with refuses(r"callbacks\.layerselection='fedavg'.*weights for each layer"):
        run.callbacks[0].on_fit_start(run)
    LayerSelection().on_fit_start(make_run(KAPC()))


# ---------------------------------------------------------------- in a run


NORMED = "--method kapc --model cases.Small"


def numbers(folder):
    """All that a run's clients and its relation came to."""
    run = RunFolder(folder)
    relations = [run.read_relation(t).rows.tolist() for t in (1, 2, 3)]
    return [run.read("clients"), run.read("final"), relations]


@pytest.mark.slow
def test_all_layers_both_ways_is_kapc(fit):
    """INV1: mu infinite and Omega = L, bit for bit, over rounds with a partial cohort."""
    flags = f"{NORMED} --federation.participation 0.5 --method.beta 0.5"
    whole = fit("whole", flags, f"{SELECTION}.mu null --callbacks.layerselection.client false")
    assert numbers(fit("plain", flags)) == numbers(whole)


@pytest.mark.slow
def test_nothing_downloaded_is_local(fit):
    """INV2: mu = 0, bit for bit."""
    nothing = RunFolder(fit("nothing", f"--method kapc --method.start own {SELECTION}.mu 0"))
    assert all(
        row["download_bytes"] == 0 and row["coaching_loss"] == 0 for row in nothing.read("metrics")
    )
    names = ("round", "client", "train_loss", "accuracy_after")
    alone = RunFolder(fit("alone", "--method local"))
    one, other = (
        [[row[name] for name in names] for row in run.read("clients")] for run in (nothing, alone)
    )
    assert one == other
    assert nothing.read("final") == alone.read("final")


def test_which_width_the_bound_is_given(make_run, make_client, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "fl_lightning.callbacks.selection.bound_holds",
        lambda *args: seen.append(args[5].outputs.tolist()),
    )
    monkeypatch.setattr(
        "fl_lightning.callbacks.selection._output_sizes", lambda client, outputs: outputs + 0.5
    )
    client = make_client(make_run(KAPC(), callbacks=[LayerSelection()]), 0)
    client.state.rounds, client.memory["selection.omega"] = 1, torch.tensor(1)
    for width in ("channels", "numbers"):
        LayerSelection(width=width)._omega(client)
    L, plain = len(client.layout.layers), _sizes(client.layout).outputs
    assert seen == [plain.tolist()] * L + [(plain + 0.5).tolist()] * L
    with refuses(r"layerselection\.width.*one of channels, numbers"):
        LayerSelection(width="depth")
