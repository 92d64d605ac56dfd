"""FedAvg with a term of a method's own in the local loss: MOON (card 1.7), FedGen (1.13) and
FedAlign (1.14)."""

import math

import numpy as np
import pytest
import torch
from reckoning import WHOLE, batch_of, seeded, shaken
from refusals import refuses
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.testing import assert_close
from torchvision.models.resnet import BasicBlock
from watching import Nets, client_of, module_of, payload_of, run_all, same, train

from fl_lightning.methods.fedalign import FedAlign, slim_channels, slimmed, stretch, transmitting
from fl_lightning.methods.fedgen import (
    FedGen,
    Generated,
    Generator,
    diversity_loss,
    ensemble_loss,
    generator_loss,
)
from fl_lightning.methods.moon import MOON, contrast

BLOCK = {"plain": "body.1", "norm": "hidden"}
SMALL = {"noise": 4, "hidden": 8, "generator_steps": 5}


# ---------------------------------------------------------------- another model within a loss


@Nets
def test_a_pass_under_another_vector_leaves_no_trace(federation, net):
    """Features and scores are those of the model itself in evaluation mode; what is bound, and its
    statistics, stay."""
    fed = federation(MOON(), net=net)
    client = client_of(fed, 1)
    other = shaken(client, 0.3)
    (x, _), module = batch_of(client, 20), client.bind(other)
    module.model.eval()
    want = module.model(x), module.features
    module = client.bind()
    module.model.train()
    module.model(x)
    seen, before = module.features, [client["model"].clone(), other.clone()]
    features, scores = module.outputs_at(other, x)
    assert_close((scores, features), want)
    assert not scores.requires_grad and module.features is seen and module.model.training
    assert all(m.training for m in module.model.modules())
    assert same([client["model"], other], before)


# ---------------------------------------------------------------- MOON


def test_the_contrast_is_what_it_says():
    """INV2 and INV3: ln 2 without a gradient where both are equal; ln(1 + e^-4) where they are
    opposite."""
    draws = seeded()
    z, other = (torch.randn(5, 6, generator=draws) for _ in range(2))
    leaf = z.clone().requires_grad_()
    loss = contrast(leaf, other, other, 0.5)
    assert loss.item() == pytest.approx(math.log(2))
    assert not torch.autograd.grad(loss, leaf)[0].any()
    assert float(contrast(z, 3 * z, -z, 0.5)) == pytest.approx(math.log(1 + math.exp(-4)), rel=1e-5)
    near, far = (
        (z * w).sum(1) / z.norm(dim=1) / w.norm(dim=1) / 0.7 for w in (other, other.flip(0))
    )
    want = -(near.exp() / (near.exp() + far.exp())).log().mean()
    assert_close(contrast(z, other, other.flip(0), 0.7), want)


def test_moons_loss_is_of_received_and_last_model(federation):
    """And INV4: neither is written to, its running statistics included."""
    fed = federation(MOON(mu=2.0), net="norm", **WHOLE)
    client = client_of(fed, 1, t=2)
    client.state.rounds = 1
    client["model"].copy_(last := shaken(client, 0.3))
    client.payload = payload_of(client, received := shaken(client, 0.3, seed=1))
    kept = [last.clone(), received.clone()]
    MOON().receive(client, client.payload)
    assert torch.equal(client["model"], received) and torch.equal(client["last"], last)
    client["model"].add_(0.01)  # as if it had trained
    [phase] = MOON(mu=2.0).phases(client, client.payload)
    client["model"].add_(0.01)
    batch, module = batch_of(client, 20), client.bind()
    module.model.train()
    loss = phase.objective.loss
    buffers = client["model"][client.layout.parameters.stop :].clone()
    value = loss(module, batch)
    z = module.features
    client["model"][client.layout.parameters.stop :] = buffers
    task = module.task_loss(batch)
    others = [module.outputs_at(v, batch[0])[0] for v in (received + 0.01, last)]
    assert_close(value, task + 2 * contrast(z, *others, 0.5))
    train(fed, client, phase)
    assert same([client["last"], received], kept)


def test_moons_projection_stands_before_the_classifier(federation):
    fed = run_all(federation(MOON(projection=5), rounds=2, net="norm"))
    client = client_of(fed, 0)
    heads = {b.name: b.shape for b in client.layout.blocks if b.head}
    place = "model.classifier.out"
    assert heads == {f"{place}.weight": (10, 5), f"{place}.bias": (10,)}
    module = client.bind()
    module.model(batch_of(client, 7)[0])
    assert module.features.shape == (7, 5)


# ---------------------------------------------------------------- FedAlign


@pytest.mark.parametrize("shapes", [((4, 6, 6), (5, 3, 3)), ((4, 3, 3), (5, 3, 3)), ((7,), (5,))])
def test_the_stretch_is_the_greatest_singular_value(shapes):
    """INV3, on T = a b^T / (H W) after the input has been pooled to the output's size."""
    draws = seeded()
    a, b = (torch.rand(6, *shape, generator=draws) + 0.2 for shape in shapes)
    small = nn.functional.adaptive_avg_pool2d(a, b.shape[2:]) if a.ndim == 4 else a
    for k, (T, value) in enumerate(zip(transmitting(a, b), stretch(a, b), strict=True)):
        x, y = (
            small[k].flatten(1).numpy() if a.ndim == 4 else small[k, :, None].numpy(),
            b[k].reshape(len(b[k]), -1).numpy(),
        )
        np.testing.assert_allclose(T, x @ y.T / x.shape[1], rtol=1e-5)
        assert float(value) == pytest.approx(np.linalg.svd(x @ y.T / x.shape[1])[1][0], rel=1e-3)
    leaf = torch.zeros(2, 3, requires_grad=True)  # a sample whose channels are all 0: no NaN
    value = stretch(leaf, torch.ones(2, 3))
    assert (
        value.max().item() < 1e-15 and not torch.autograd.grad(value.square().sum(), leaf)[0].any()
    )


def test_a_block_is_slimmed_by_its_first_channels():
    """Against a block of that width, with its weights; statistics are neither read nor written."""
    torch.manual_seed(0)
    stride = nn.Sequential(nn.Conv2d(4, 8, 1, stride=2, bias=False), nn.BatchNorm2d(8))
    block, x = BasicBlock(4, 8, 2, stride), torch.randn(5, 4, 6, 6)
    small = BasicBlock(
        1, 2, 2, nn.Sequential(nn.Conv2d(1, 2, 1, stride=2, bias=False), nn.BatchNorm2d(2))
    )
    for (name, p), q in zip(small.named_parameters(), block.parameters(), strict=True):
        p.data = q.data[: len(p), : p.shape[1]] if p.ndim > 1 else q.data[: len(p)]
        assert name and p.shape[0] == 2
    before = [b.clone() for b in block.buffers()]
    assert_close(slimmed(block, x[:, :1], 0.25), small(x[:, :1]))
    assert same(list(block.buffers()), before)
    assert [slim_channels(n, 0.25) for n in (1, 4, 5, 512)] == [1, 1, 2, 128]


@Nets
@pytest.mark.parametrize("width", [0.25, 1.0])
def test_fedaligns_term_weighs_as_the_task_loss(federation, net, width):
    """Its value is mu times CE (0 at full width: INV2); nothing before the block feels it
    (INV4)."""
    method = FedAlign(mu=0.45, width=width, block=BLOCK[net])
    fed = federation(method, net=net, **WHOLE)
    client = client_of(fed, 1)
    batch, module = batch_of(client), client.bind()
    module.model.train()
    [phase] = method.phases(client, payload_of(client))
    before = client["model"].clone()
    value, task = phase.objective.loss(module, batch), module.task_loss(batch)
    stop = client.layout.parameters.stop
    assert torch.equal(client["model"][:stop], before[:stop])
    assert_close(value, (1.45 if width < 1 else 1.0) * task)
    moved = torch.autograd.grad(value - task, list(module.model.parameters()), allow_unused=True)
    touched = {
        name.rpartition(".")[0]
        for (name, _), g in zip(module.model.named_parameters(), moved, strict=True)
        if g is not None and g.abs().max() > 1e-9
    }
    assert touched == ({BLOCK[net]} if width < 1 else set())
    assert (
        phase.objective.loss.flops > 0 and not module.model.get_submodule(BLOCK[net])._forward_hooks
    )


@pytest.mark.parametrize(
    "block, said",
    [
        (None, "a part of its channels"),
        ("nothing", "no such module"),
        ("body.0", "a part of its channels"),
    ],
)
def test_blocks_that_cannot_be_slimmed(federation, block, said):
    with refuses(rf"method\.block.*{said}"):
        federation(FedAlign(block=block)).prepare()


def test_a_block_is_tried_before_the_first_step(federation):
    """The trial leaves no trace, and is left out where the term is."""
    fed = federation(FedAlign(), net="norm")
    before, mode = fed.run.groups[0].initial.clone(), module_of(fed).model.training
    fed.prepare()
    assert torch.equal(fed.run.groups[0].initial, before) and module_of(fed).model.training == mode
    assert not module_of(fed).model.hidden._forward_hooks
    federation(FedAlign(mu=0.0, block="nothing")).prepare()


# ---------------------------------------------------------------- FedGen


def test_the_codes_generator_normalises_draws_evenly_and_decays():
    """Against torch's own modules: two linear layers with BatchNorm and ReLU between, Adam with
    weight decay 0.01."""
    G, seed = Generator(3, 5, 2, 8, code=True), seeded()
    first, class_counts = G.initial_tensors(seed), torch.tensor([[40, 0, 2], [1, 0, 9]])
    heads = torch.randn(2, 3, 5, generator=seed), torch.randn(2, 3, generator=seed)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
    layers = [net[0].weight, net[0].bias, net[3].weight, net[3].bias, net[1].weight, net[1].bias]
    sizes = [40, 8, 40, 5, 8, 8]
    for tensor, part in zip(layers, first["generator"].split([*sizes, 16]), strict=False):
        tensor.data.copy_(part.view_as(tensor))
    memory, draws, again = first, *(seeded(1) for _ in range(2))
    optimizer = torch.optim.Adam(layers, 0.05, weight_decay=0.01)
    for rate in (0.05, 0.05 * 0.98, 0.05 * 0.98**2):  # three rounds of 4 steps
        method = FedGen(
            teacher="weighted", eta=0.1, generator_lr=0.05, generator_steps=4, generator_batch=16
        )
        memory = method.train_generator(G, memory, heads, class_counts, draws)
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(4):
            y = torch.multinomial(torch.tensor([1.0, 0, 1]), 16, replacement=True, generator=again)
            eps = torch.rand(16, 2, generator=again)
            z = net(torch.cat([eps, one_hot(y, 3)], 1))
            loss = ensemble_loss(
                Generated(z, y, eps), heads, class_counts / torch.tensor([41.0, 1, 11])
            )
            optimizer.zero_grad()
            (loss + 0.1 * diversity_loss(Generated(z, y, eps))).backward()
            optimizer.step()
    moved = [*layers, net[1].running_mean, net[1].running_var]
    assert_close(memory["generator"], torch.cat([t.detach().flatten() for t in moved]))
    assert memory["labels"].tolist() == [1, 0, 1]
    net.eval()  # a client's
    drawn = G.sample_features(memory["generator"], memory["labels"], 200, seeded(2))
    assert_close(drawn.features, net(torch.cat([drawn.eps, one_hot(drawn.y, 3)], 1)).detach())
    assert not (drawn.y == 1).any()


def test_what_the_generator_tells_a_client(federation):
    """alpha CE(head(G(y')), y') + beta KL(head(G(y)) || model(x)), the teacher constant; both drawn
    one by one."""
    fed = federation(FedGen(**SMALL))
    G, module = Generator(10, 16, 4, 8), client_of(fed, 1).bind()
    theta = G.initial_tensors(seeded())["generator"]
    (x, y), prior, head = batch_of(client_of(fed, 1), 12), torch.arange(10.0), module.head
    scores = module.model(x)
    torch.manual_seed(3)
    drawn, again = G.sample_features(theta, prior, 9), G.features_of(theta, y)
    teacher = head(again.features).softmax(1).detach()
    kl = (teacher * (teacher.log() - scores.log_softmax(1))).sum() / 12
    ce = cross_entropy(head(drawn.features), drawn.y)
    module.model(x)
    for alpha, beta in ((0.3, 0.0), (0.3, 0.7)):
        torch.manual_seed(3)
        value = generator_loss(G, theta, module, y, prior, count=9, alpha=alpha, beta=beta)
        assert_close(value, alpha * ce + beta * kl)
    expected = 0.3 * ce + 0.7 * kl
    # the teacher is no way back to the classifier
    for tensor in (module.model.body[1].weight, head.weight):
        ours, theirs = (
            torch.autograd.grad(term, tensor, retain_graph=True)[0] for term in (value, expected)
        )
        assert ours.any()
        assert_close(ours, theirs)
