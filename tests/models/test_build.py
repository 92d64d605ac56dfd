import copy
import re
from collections import namedtuple

import pytest
import torch
from lightning import LightningModule
from refusals import refuses
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from fl_lightning.configuration.config import Component
from fl_lightning.methods.fedem import Mixture
from fl_lightning.models import build, freshly_drawn, head_of, why_head_is_doubtful

# an importable module into which the tests put their users' classes
HERE = "fl_lightning.foundation.errors"
BUILT_IN = [
    "fl_lightning.models.cnn.CNN",
    "fl_lightning.models.mlp.MLP",
    "fl_lightning.models.resnet18.ResNet18",
]


class Theirs(nn.Module):
    """A user's model, which knows nothing of us."""

    def __init__(self, width: int = 4, num_classes: int = 10):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm2d(1)
        self.body = nn.Linear(64, width)
        self.out = nn.Linear(width, num_classes)
        self.norm.eval()

    def forward(self, x):
        noise = torch.randn(len(x), 1)
        return self.out(self.body(self.dropout(self.norm(x)).flatten(1)) + noise)


@pytest.fixture
def theirs(monkeypatch):
    monkeypatch.setattr(f"{HERE}.Theirs", Theirs, raising=False)
    return f"{HERE}.Theirs"


@pytest.mark.parametrize("path", BUILT_IN)
def test_built_in_models_fit_the_usual_data(path):
    for shape, classes in (((1, 8, 8), 10), ((1, 28, 28), 47), ((3, 32, 32), 100)):
        small = {"padding": 2} if path.endswith("CNN") and shape[1] < 16 else {}
        model = build(Component(path, small), shape, classes)
        assert model(torch.zeros(3, *shape)).shape == (3, classes)
        head = model.get_submodule(head_of(model))
        assert isinstance(head, nn.Linear)
        assert head.out_features == classes
        assert model.training


def test_trying_a_model_out_leaves_no_trace(theirs):
    torch.manual_seed(0)
    plain = Theirs(num_classes=3)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = build(Component(theirs), (1, 8, 8), 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == [
        module.training for module in plain.modules()
    ]
    assert not model.get_submodule("norm").training
    for key, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key])


@pytest.mark.parametrize(
    "path, init_args, shape, message",
    [
        (
            BUILT_IN[0],
            {"widths": 3},
            (1, 8, 8),
            "building it failed: .* unexpected keyword argument 'widths'",
        ),
        (BUILT_IN[0], {"channels": [3]}, (1, 28, 28), "building it failed"),
        (BUILT_IN[0], {}, (20,), r"larger images than \(20,\)"),
        (BUILT_IN[0], {}, (1, 8, 8), r"larger images than \(1, 8, 8\)"),
        (
            BUILT_IN[0],
            {"input_shape": [1, 32, 32]},
            (1, 28, 28),
            r"shape \(1, 28, 28\) and 10 classes, on which",
        ),
        (BUILT_IN[1], {"num_classes": 4}, (1, 8, 8), r"returns \(2, 4\) instead of \(2, 10\)"),
        (BUILT_IN[2], {"stem": "5x5"}, (1, 8, 8), "choose 7x7 or 3x3"),
        (BUILT_IN[2], {}, (20,), "it needs images"),
        ("torch.nn.Identity", {}, (1, 8, 8), r"returns \(2, 1, 8, 8\) instead of"),
        ("torch.nn.Module", {}, (1, 8, 8), "forward"),
    ],
)
def test_bad_models_are_one_line(path, init_args, shape, message):
    with refuses(message) as caught:
        build(Component(path, init_args), shape, 10)
    assert caught.value.key.startswith("model")
    assert "\n" not in str(caught.value)


class Traced(nn.Module):
    """A body, a classifier, and something that is defined after it."""

    def __init__(self):
        super().__init__()
        self.body, self.top, self.gate = nn.Linear(64, 12), nn.Linear(12, 10), nn.Linear(12, 12)

    def forward(self, x):
        return self.score(self.body(x.flatten(1)).relu())

    def score(self, z):
        return self.top(z * self.gate(z).sigmoid())


class Probabilities(Traced):
    """A temperature, a normalisation and logarithms behind the classifier."""

    def __init__(self):
        super().__init__()
        self.temperature, self.norm = nn.Parameter(torch.ones(())), nn.LayerNorm(10)

    def score(self, z):
        return (self.norm(super().score(z)) / self.temperature).log_softmax(1)


class Pooled(Traced):
    """A convolution is the classifier, and its maps are averaged."""

    def __init__(self):
        super().__init__()
        self.top = nn.Sequential(nn.Conv1d(12, 10, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten())

    def score(self, z):
        return self.top((z * self.gate(z))[:, :, None])


class Cosine(Traced):
    """The classifier has a matrix of its own."""

    def __init__(self):
        super().__init__()
        self.top = CosineTop()


class CosineTop(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 12))

    def forward(self, z):
        return 4 * nn.functional.normalize(z) @ nn.functional.normalize(self.weight).T


class Frozen(Traced):
    """Nothing of it trains."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class Normed(Traced):
    """The classifier's weight is computed from others."""

    def __init__(self):
        super().__init__()
        self.top = spectral_norm(nn.Linear(12, 10, bias=False))


class Tied(Traced):
    """Scores are products with the rows of a table that the body begins with."""

    def __init__(self):
        super().__init__()
        self.top = nn.Embedding(10, 12)

    def score(self, z):
        return nn.functional.linear(z * self.gate(z), self.top.weight)


@pytest.mark.parametrize("net", [Traced, Probabilities, Pooled, Cosine, Frozen, Normed, Tied])
def test_the_head_is_what_scores_come_from(net, monkeypatch):
    """Not what is defined last."""
    monkeypatch.setattr(f"{HERE}.Net", net, raising=False)
    model = build(Component(f"{HERE}.Net"), (1, 8, 8), 10)
    name = "top.0" if net is Pooled else "top"
    assert head_of(model) == name and head_of(copy.deepcopy(model)) == name
    assert (why_head_is_doubtful(model) is None) == (net is not Tied)
    assert all(p.requires_grad != (net is Frozen) for p in model.parameters())


class Two(Traced):
    """Two classifiers."""

    def score(self, z):
        return self.top(z) + self.gate(z)[:, :10]


class TwoAndMore(Two):
    """And a layer that is defined later."""

    def __init__(self):
        super().__init__()
        self.later = nn.Linear(64, 64)

    def forward(self, x):
        return super().forward(self.later(x.flatten(1)))


def test_of_two_classifiers_one_is_taken_aloud_or_none(monkeypatch):
    monkeypatch.setattr(f"{HERE}.Two", Two, raising=False)
    monkeypatch.setattr(f"{HERE}.TwoAndMore", TwoAndMore, raising=False)
    model = build(Component(f"{HERE}.Two"), (1, 8, 8), 10)
    assert head_of(model) == "gate"
    doubt = why_head_is_doubtful(model)
    assert (
        doubt is not None
        and "its scores come from gate, top; gate is taken for its classifier" in doubt
    )
    other = build(Component(f"{HERE}.TwoAndMore"), (1, 8, 8), 10)
    with refuses(r"its scores come from gate, top; name one of them .* attribute `head`"):
        head_of(other)
    other.head = "top"
    assert head_of(other) == "top" and why_head_is_doubtful(other) is None


class Odd(nn.Module):
    """A weight of its own that nothing resets, and a layer with its own first weights."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(64))
        self.out = nn.Linear(64, 10)
        nn.init.uniform_(self.out.weight, 5, 6)

    def forward(self, x):
        return self.out(x.flatten(1) * self.scale)


class Zero(Odd):
    """Always begins the same."""

    def __init__(self):
        super().__init__()
        for p in self.parameters():
            nn.init.zeros_(p)


def test_another_network_has_first_weights_of_its_own(monkeypatch):
    """All of them, drawn as the class draws them: it is built again."""
    monkeypatch.setattr(f"{HERE}.Odd", Odd, raising=False)
    model = build(Component(f"{HERE}.Odd"), (1, 8, 8), 10)
    for twin in (freshly_drawn(model), Mixture(model, 2).components[1]):
        assert isinstance(twin, Odd) and not torch.equal(twin.scale, model.scale)
        assert not torch.equal(twin.out.weight, model.out.weight) and twin.out.weight.min() >= 5


def test_what_cannot_begin_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(f"{HERE}.Zero", Zero, raising=False)
    with refuses("always has the same weights"):
        freshly_drawn(build(Component(f"{HERE}.Zero"), (1, 8, 8), 10))
    with refuses(r"its Odd has no reset_parameters\(\)"):
        freshly_drawn(Odd())  # not built here: it can only be copied
    linear = nn.Linear(3, 2)
    other = freshly_drawn(linear)
    assert not torch.equal(other.weight, linear.weight)


class Branching(nn.Module):
    """Gives what `OUTPUTS[kind]` makes of its scores, always or while it trains."""

    def __init__(self, kind: str, always: bool = False):
        super().__init__()
        self.kind, self.always = kind, always
        self.norm, self.out = nn.BatchNorm2d(1), nn.Linear(64, 10)

    def forward(self, x):
        scores = self.out(self.norm(x).flatten(1))
        return OUTPUTS[self.kind](scores) if self.training or self.always else scores


class Judged(Branching, LightningModule):
    """A `training_step` takes what it gives."""

    def training_step(self, batch, batch_idx):
        return self(batch[0])[0].sum()


Scores = namedtuple("Scores", "logits aux")
OUTPUTS = {
    "Scores (logits, aux)": lambda scores: Scores(scores, scores),
    "tuple of 2": lambda scores: (scores, scores),
    "list of 1": lambda scores: [scores],
    "dict (logits)": lambda scores: {"logits": scores},
    "NoneType": lambda scores: None,
    "(2, 3)": lambda scores: scores[:, :3],
    "(2, 1)": lambda scores: scores[:, :1],
    "numbers of torch.int64": lambda scores: scores.long(),
}


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_what_is_no_class_scores_is_named(kind, always, monkeypatch):
    monkeypatch.setattr(f"{HERE}.Branching", Branching, raising=False)
    when = "but for two samples" if always else "in training mode"
    line = rf"{when} it returns {re.escape(kind)} instead of "
    with refuses(rf"^model='fl_lightning.foundation.errors.Branching': .*{line}"):
        build(Component(f"{HERE}.Branching", {"kind": kind, "always": always}), (1, 8, 8), 10)


def test_a_training_step_takes_what_the_model_gives_while_it_trains(monkeypatch):
    monkeypatch.setattr(f"{HERE}.Judged", Judged, raising=False)
    build(Component(f"{HERE}.Judged", {"kind": "tuple of 2"}), (1, 8, 8), 10)
