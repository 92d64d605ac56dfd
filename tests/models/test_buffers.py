"""Buffers that belong to weights, and modules whose buffers nobody can average."""

from typing import Any

import pytest
import torch
from classes import MOON, FedAvg, FedPer
from reckoning import seeded
from refusals import refuses
from torch import nn
from torch.nn.utils import spectral_norm as hooked
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from fl_lightning.core import Layout
from fl_lightning.core.buffers import singular_vectors
from fl_lightning.core.layout import Binding
from fl_lightning.engine.predictor import Predictor
from fl_lightning.models import head_of


class Net(nn.Module):
    """Two layers, the first of them wrapped."""

    head = "out"
    wrap: Any = staticmethod(spectral_norm)

    def __init__(self):
        super().__init__()
        self.hidden = type(self).wrap(nn.Linear(64, 16))
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        return self.out(self.hidden(x.flatten(1)).relu())


class Chained(Net):
    """A spectral normalisation behind another parametrisation, of a matrix whose columns come
    first."""

    wrap = staticmethod(lambda layer: spectral_norm(weight_norm(layer), dim=1))


class Hooked(Net):
    """The older hook."""

    wrap = staticmethod(hooked)


def norm(model):
    """The greatest singular value of the weight that the first layer computes with."""
    model.eval()
    model(torch.zeros(1, 1, 8, 8))
    return float(torch.linalg.matrix_norm(model.hidden.weight.detach(), 2))


@pytest.mark.parametrize("net", [Net, Chained])
def test_an_averaged_weight_is_divided_by_its_own_norm(federation, net):
    fed = federation(
        FedAvg(), net, optimizer={"lr": 0.5}, evaluation={"models": ["before", "after", "global"]}
    )
    fed.prepare()
    for t in (1, 2):
        fed.round(t)
    kind, vector, buffers = fed.evaluator.final_model(0)
    exported = Predictor(fed.evaluator.at_rest(0, buffers), kind, vector).network
    assert norm(exported) == pytest.approx(1, abs=1e-3)
    state = net()
    state.load_state_dict(exported.state_dict())
    assert norm(state) == pytest.approx(1, abs=1e-3)


def test_buffers_follow_from_the_weight_alone():
    torch.manual_seed(0)
    model = Net()
    layout = Layout(model, head_of(model))
    vector, buffers = layout.read(model)
    others = [torch.nn.functional.normalize(torch.randn(b.shape), dim=0) for b in buffers]
    binding = Binding(model, layout)
    for some in (buffers, others):
        binding.bind(vector.clone(), some)
        binding.rebind(binding.vector, some)
    assert all(map(torch.equal, buffers, others))


def test_scores_in_between_change_no_spectral_norm_that_trains(federation):
    models = []
    for every in (1, 2):
        fed = federation(
            FedPer(), Net, evaluation={"every": every, "models": ["before", "after"]}, rounds=3
        )
        fed.prepare()
        for t in (1, 2, 3):
            fed.round(t)
        models.append(fed.run.states[0].vectors["model"])
    assert torch.equal(*models)


def test_another_model_has_buffers_of_its_own_while_one_trains(federation):
    """MOON's loss compares the model that trains with two others."""
    fed = federation(MOON(), Net)
    fed.prepare()
    fed.round(1)
    client = fed.evaluator.at_rest(0)
    module, other = client.bind(), torch.randn(client.layout.size)
    trained, buffers = module.binding.vector, [b.clone() for b in client.state.buffers]
    x = torch.randn(3, 1, 8, 8)
    features = module.outputs_at(other, x)[0]
    assert module.binding.vector is trained and all(
        map(torch.equal, buffers, module.binding.buffers)
    )
    module.binding.bind(other, buffers)
    module.model.eval()
    module.model(x)
    assert torch.allclose(module.features, features)


@pytest.mark.parametrize("wrap", [weight_norm, orthogonal], ids=["weight_norm", "orthogonal"])
def test_other_parametrisations_are_averaged_as_parameters(federation, wrap):
    net = type("Wrapped", (Net,), {"wrap": staticmethod(wrap)})
    fed = federation(FedAvg(), net)
    fed.prepare()
    assert fed.round(1).metrics["train_loss"] > 0


class Uncalled(Net):
    """A lazy layer that the forward pass does not reach."""

    def __init__(self):
        super().__init__()
        self.more = nn.LazyLinear(3)


class Observed(Net):
    """Notes ranges of its inputs, as for quantisation."""

    def __init__(self):
        super().__init__()
        self.more = torch.ao.quantization.MinMaxObserver()


class Synchronised(Net):
    """A BatchNorm over processes."""

    def __init__(self):
        super().__init__()
        self.more = nn.SyncBatchNorm(3)


@pytest.mark.parametrize(
    "net, message",
    [
        (Uncalled, "'more': LazyLinear has no weight until it is called"),
        (Observed, "'more': MinMaxObserver records ranges of activations"),
        (Synchronised, "'more': SyncBatchNorm would mix batches of clients"),
        (Hooked, "'hidden': Linear uses torch's older spectral_norm"),
    ],
)
def test_buffers_that_nobody_can_average_are_refused(federation, net, message):
    with refuses(f"^model={message}"):
        federation(FedAvg(), net)


@pytest.mark.parametrize("shape", [(3, 40), (64, 64), (600, 700)])
def test_singular_vectors(shape):
    matrix = torch.randn(shape, generator=seeded(1))
    left, right = singular_vectors(matrix)
    assert float(left @ matrix @ right) == pytest.approx(
        float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-3
    )
