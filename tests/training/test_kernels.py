"""The terms beside the loss and the direction of a step, against autograd, finite differences and
torch's own SGD."""

import numpy as np
import pytest
import torch
from reckoning import seeded
from torch import nn
from torch.testing import assert_close

from fl_lightning.configuration.config import OptimizerConfig
from fl_lightning.core.layout import Layout
from fl_lightning.core.objective import Objective
from fl_lightning.foundation.parallel import one_process
from fl_lightning.training.kernels import Terms, max_pool
from fl_lightning.training.module import ClientModule
from fl_lightning.training.optimizers import AnyOptimizer, FastSGD


def rows(k=3, size=6, seed=0):
    return torch.randn(k, size, dtype=torch.float64, generator=seeded(seed))


@pytest.mark.parametrize("k", [1, 3])
def test_terms_against_autograd(k):
    """Value and gradient, with one number for each stretch of columns and with a tensor of
    coefficients alike."""
    w, anchor, linear = rows(k, seed=1).requires_grad_(), rows(k, seed=2), rows(k, seed=3)
    c = torch.tensor([0.7, 0.7, 0.0, 0.2, 0.2, 0.0], dtype=torch.float64)
    want = (c * (w - anchor).square()).sum(1) + (linear * w).sum(1)
    [slope] = torch.autograd.grad(want.sum(), w)
    segments = [(0, 2, 1.4), (3, 5, 0.4), (2, 3, 0.0), (5, 6, 0.0)]
    for columns in (segments, [(0, 6, (2 * c).expand(k, -1))]):
        terms = Terms(torch.full_like(anchor, torch.nan), anchor, linear, columns)
        assert_close(terms.value(w.detach()), want.detach(), rtol=1e-14, atol=0)
        assert_close(terms.gradient(), slope, rtol=1e-14, atol=1e-15)


def test_columns_that_are_not_pulled_may_hold_anything():
    anchor = torch.tensor([[1.0, torch.nan, 1.0]])
    terms = Terms(
        torch.empty(1, 3), anchor, torch.ones(1, 3), [(0, 1, 2.0), (2, 3, 2.0), (1, 2, 0.0)]
    )
    assert terms.value(torch.zeros(1, 3)).tolist() == [2.0]
    assert terms.gradient().tolist() == [[-1.0, 1.0, -1.0]]


SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 0.1},
    "momentum and decay": {"momentum": 0.5, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize("settings", [*SETTINGS.values(), {"clip_norm": 0.1, "momentum": 0.5}])
def test_fast_sgd_is_torch_sgd(settings):
    """Also where one gradient tensor reaches two parameters, and where the loss does not reach a
    parameter."""
    config = OptimizerConfig(lr=0.1, **settings)
    first, second = ([nn.Parameter(rows(1, 4, seed=k)[0]) for k in range(3)] for _ in range(2))
    settings = dict(settings)
    clip = settings.pop("clip_norm", None)
    fast, sgd = FastSGD(first, config), torch.optim.SGD(second, lr=0.1, **settings)
    for t in range(3):
        fast.step((first[0] + first[1]).square().sum() * (t + 1))
        sgd.zero_grad()
        ((second[0] + second[1]).square().sum() * (t + 1)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(second, clip)
        sgd.step()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- the module's objective


def module():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    layout = Layout(model, "2")
    found = ClientModule(model, layout, 2)
    row, buffers = layout.read(model, torch.float64)
    found.binding.bind(row, buffers)
    return found, row


def batch():
    return rows(5, 3), torch.tensor([0, 1, 0, 1, 1])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reached", [True, False])
def test_the_terms_are_added_alike_by_both_optimizers(reached, frozen):
    """To the bit, also with frozen parameters and where the loss reaches none."""
    after = []
    for fast in (False, True):
        client, row = module()
        for name in ("0.bias", "2.weight") if frozen else ():
            client.model.get_parameter(name).requires_grad_(False)
        client.trainable = np.array([p.requires_grad for p in client.binding.parameters])
        loss = None if reached else lambda module, batch: torch.zeros((), dtype=torch.float64)
        pull = np.array([0.3, 0.0, 0.1, 0.3, 0.2, 0.2, 0.0, 0.0])
        client.set_objective(Objective(rows(1, len(row), seed=4)[0], pull, loss=loss))
        trained = [p for p in client.binding.parameters if p.requires_grad]
        config = OptimizerConfig(lr=0.1, momentum=0.5)
        sgd = FastSGD(trained, config)
        if not fast:
            sgd = AnyOptimizer(
                one_process("64-true"), torch.optim.SGD(trained, 0.1, 0.5), trained, config
            )
        for _ in range(3):
            loss_of_batch = client.training_step(batch())
            terms = client.objective_terms()
            sgd.step(loss_of_batch, terms[1])
        after.append(row)
    assert torch.equal(*after)
    assert not torch.equal(after[0], module()[1])


def test_an_anchor_needs_a_pull():
    with pytest.raises(ValueError, match="needs an anchor"):
        Objective(anchor=torch.zeros(3))


@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, padding=1), nn.MaxPool2d((2, 3), (1, 2))]
)
def test_pooling_with_gradients_is_that_of_torch_to_the_bit(pool, channels):
    """Ties (zeros after the activation), and gradients of gradients."""
    x = torch.randn(4, channels, 9, 8, generator=seeded(0)).relu().requires_grad_()
    results = []
    for forward in (max_pool, nn.MaxPool2d.forward):
        out = forward(pool, x)
        (slope,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.pow(2).sum(), x)
        results.append((out, slope, curve, out.stride(), slope.stride(), curve.stride()))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
    fast = type(max_pool(pool, x).grad_fn).__name__ == "MaxPoolBackward"
    assert fast == (channels == 8)


def test_only_modules_that_are_known_to_draw_nothing_go_unseeded():
    class Own(nn.ReLU):
        """Its forward pass might draw."""

    middles = [nn.ReLU(), nn.Dropout(0.5), Own(), nn.ReLU(), nn.ReLU()]
    middles[3].register_forward_hook(lambda *_: None)
    middles[4].forward = torch.relu
    nets = [nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 2)) for middle in middles]
    draws = [ClientModule(net, Layout(net, "2"), 2).draws for net in nets]
    assert draws == [False, True, True, True, True]
