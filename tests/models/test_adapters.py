"""Adapters and weights: what trains, what it computes, and what is refused."""

from pathlib import Path

import pytest
import torch
from classes import FedAvg, FedEM, FedRoD
from refusals import refuses
from safetensors.torch import save_file
from torch import nn

from fl_lightning.cli import main as cli
from fl_lightning.configuration.components import Network
from fl_lightning.configuration.config import Component
from fl_lightning.configuration.flags import layers_of_flags, read_flags
from fl_lightning.configuration.resolve import resolve
from fl_lightning.engine.build import federation as federate
from fl_lightning.models import build, head_of
from fl_lightning.models.vit import ViT

pytest.importorskip("peft")

# an importable module into which the tests put their users' classes
HERE = "fl_lightning.foundation.errors"
MLP = "fl_lightning.models.mlp.MLP"
VIT = "fl_lightning.models.vit.ViT"
SMALL = {"depth": 2, "width": 16, "heads": 2}
DIGITS = ((1, 8, 8), 10)


def trains(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adapted(path=VIT, args=None, **adapters):
    torch.manual_seed(0)
    return build(Network(path, SMALL if args is None else args, adapters=adapters), *DIGITS)


def test_queries_and_values_of_every_layer_get_a_and_b():
    model = adapted(rank=3)
    assert isinstance(model, ViT) and head_of(model) == "net.heads.head"
    names = trains(model)
    places = [
        f"net.encoder.layers.encoder_layer_{k}.self_attention.{part}"
        for k in (0, 1)
        for part in ("query", "value")
    ]
    ab = {f"{place}.lora_{x}.default.weight" for place in places for x in "AB"}
    assert {*names} == ab | {"net.heads.head.weight", "net.heads.head.bias"}
    assert sum(names[n].numel() for n in ab) == 4 * 2 * 3 * 16
    assert {*trains(adapted(head=False))} == ab


def test_what_an_adapter_adds_is_alpha_b_a_over_r():
    """Hu et al., section 4.1; in double precision, by hand."""
    model, x = (
        adapted(MLP, {"hidden": [5]}, rank=2, alpha=6.0).double(),
        torch.randn(3, 64).double(),
    )
    layer = model.get_submodule("hidden.0")
    b = torch.nn.init.normal_(layer.lora_B.default.weight)
    a, w, bias = layer.lora_A.default.weight, layer.base_layer.weight, layer.base_layer.bias
    wanted = x @ (w + 6 / 2 * b @ a).T + bias
    assert torch.allclose(layer(x), wanted, rtol=0, atol=1e-12)


def test_targets_are_ends_of_names():
    chosen = adapted(MLP, {"hidden": [5, 6]}, targets=["1"])
    assert {n.partition(".lora")[0] for n in trains(chosen)} == {
        "hidden.1",
        "classifier.weight",
        "classifier.bias",
    }
    # it names none itself: all linear layers but the classifier
    everything = adapted(MLP, {"hidden": [5, 6]})
    assert {n.partition(".lora")[0] for n in trains(everything) if "lora" in n} == {
        "hidden.0",
        "hidden.1",
    }
    assert head_of(everything) == "classifier"


class Torchs(nn.Module):
    """Torch's own encoder layer, which reads weights past their modules."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.free, self.out = nn.Linear(8, 8), nn.Linear(64, 10)

    def forward(self, x):
        return self.out(self.free(self.layer(x[:, 0])).flatten(1))


def test_where_an_adapter_would_go_unused_it_is_refused(monkeypatch):
    monkeypatch.setattr(f"{HERE}.Torchs", Torchs, raising=False)
    for target in ("self_attn", "linear1", "out_proj"):
        with refuses(r"model\.adapters\.targets.*torch's .* without calling modules"):
            adapted(f"{HERE}.Torchs", {}, targets=[target])
    assert {n.partition(".")[0] for n in trains(adapted(f"{HERE}.Torchs", {}))} == {"free", "out"}


@pytest.mark.parametrize(
    "adapters, said",
    [
        ({"targets": ["nowhere"]}, r"model\.adapters\.targets=\['nowhere'\].* no such module"),
        ({"targets": ["net.heads.head"]}, "no such module besides its classifier"),
        ({"targets": ["dropout"]}, "not supported"),
    ],
)
def test_what_cannot_be_adapted_is_said(adapters, said):
    with refuses(said):
        adapted(**adapters)


# ---------------------------------------------------------------- in a federation


@pytest.fixture
def around(federation):
    """A federation of small vision transformers with adapters."""

    def make(method, callbacks=(), **changes):
        fed = federation(method, **changes)
        run, fabric = fed.run, fed.worker.trainers[0].fabric
        model = adapted(rank=2).to(run.dtype)
        return federate(fabric, run.config, run.data, [model], run.method, callbacks, run.folder)

    return make


def test_further_networks_of_a_method_have_adapters_alone_too(around):
    """FedEM builds more of them: their backbones lie once on a rank as well."""
    layout = around(FedEM(components=2)).run.groups[0].layout
    assert not any("base_layer" in b.name for b in layout.blocks)
    assert sum("lora_A" in b.name for b in layout.blocks) == 2 * 4
    assert sum("base_layer.weight" in name for name in layout.frozen) == 2 * 4


def test_who_builds_on_the_classifier_wants_one_that_trains(federation):
    fed = federation(FedAvg())
    run, fabric = fed.run, fed.worker.trainers[0].fabric
    with refuses("fedrod replaces or extends the classifier, which is frozen"):
        federate(fabric, run.config, run.data, [adapted(head=False)], FedRoD(), [], run.folder)
    federate(fabric, run.config, run.data, [adapted(head=False)], FedAvg(), [], run.folder)


# ---------------------------------------------------------------- on the command line


def resolved(*flags):
    return resolve(layers_of_flags(read_flags(list(flags))[1])[0])


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--model.adapters.rank=0"], r"model\.adapters\.rank=0.* at least 1"),
        (["--model.adapters.rank=two"], r"model\.adapters\.rank='two'.* whole number"),
        (["--model.adapters.dropout=1"], r"model\.adapters\.dropout"),
        (["--model.adapters.alpha=-1"], r"model\.adapters\.alpha=-1\.0.* above 0"),
        (
            ["--model.adapters.rnk=2"],
            r"model\.adapters\.rnk=.* no such key \(did you mean model\.adapters\.rank",
        ),
        (["--model.adapters=lora"], r"model\.adapters='lora'.* a mapping, true, or null"),
        (["--model.weights=3"], r"model\.weights=3.* a safetensors file"),
    ],
)
def test_bad_adapters_are_named(flags, said):
    with refuses(said):
        resolved(*flags)


# -------------------------------------------------------------- weights, and whoever makes networks


def saved(path, change=lambda tensors: None):
    torch.manual_seed(1)
    tensors = {
        n: t.contiguous()
        for n, t in build(Component(MLP, {"hidden": [5]}), *DIGITS).state_dict().items()
    }
    change(tensors)
    save_file(tensors, path)
    return str(path)


def read(file, **options):
    torch.manual_seed(0)
    return build(Network(MLP, {"hidden": [5]}, file, **options), *DIGITS)


def test_weights_are_where_a_model_begins(tmp_path):
    file = saved(tmp_path / "w.safetensors")
    torch.manual_seed(1)
    there = build(Component(MLP, {"hidden": [5]}), *DIGITS).state_dict()
    assert all(torch.equal(t, there[n]) for n, t in read(file).state_dict().items())
    under = read(file, adapters={"rank": 2})
    assert torch.equal(under.get_parameter("hidden.0.base_layer.weight"), there["hidden.0.weight"])


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.update({"classifier.weight": torch.zeros(3, 5)}),
        lambda w: w.pop("classifier.bias"),
    ],
)
def test_a_classifier_of_other_classes_is_drawn(tmp_path, change):
    model, plain = (
        read(saved(tmp_path / "w.safetensors", change)),
        build(Component(MLP, {"hidden": [5]}), *DIGITS),
    )
    assert (
        model.get_parameter("classifier.weight").shape
        == plain.get_parameter("classifier.weight").shape
    )
    assert float(model.get_parameter("classifier.weight").detach().abs().min()) > 0


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda w: w.pop("hidden.0.bias"), r"it lacks hidden\.0\.bias, which the model has"),
        (lambda w: w.update(more=torch.zeros(1)), "it holds more, which the model lacks"),
        (
            lambda w: w.update({"hidden.0.bias": torch.zeros(7)}),
            r"hidden\.0\.bias of shape \(7,\), not \(5,\)",
        ),
        (
            lambda w: w.update({f"x{k}": torch.zeros(1) for k in range(5)}),
            "it holds x0, x1, x2, x3, x4",
        ),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, change, said):
    with refuses(rf"model\.weights=.*{said}"):
        read(saved(tmp_path / "w.safetensors", change))


def test_what_is_no_file_of_weights_is_said(tmp_path):
    with refuses("there is no such file"):
        read(str(tmp_path / "none.safetensors"))
    (tmp_path / "bad.safetensors").write_bytes(b"abc")
    with refuses("no file of tensors"):
        read(str(tmp_path / "bad.safetensors"))


def test_functions_of_torchvision_get_the_classes():
    model = build(Component("torchvision.models.squeezenet1_1", {"dropout": 0.1}), (3, 32, 32), 7)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    path = "torchvision.models.squeezenet1_1"
    found = (
        resolved(f"--model={path}", "--model.dropout=0.25", "--model.weights=a.safetensors")
        .models[0]
        .component
    )
    assert found == Network(path, {"dropout": 0.25}, "a.safetensors")


@pytest.mark.slow
def test_a_run_with_adapters_goes_on_and_gives_its_models_away(fit, monkeypatch, capsys):
    """Taken up after its second round it ends as one that was never stopped; what is exported
    scores as it did."""
    flags = "--model.adapters.rank 2 --callbacks checkpoint --callbacks.checkpoint.seconds 0"
    whole, parts = fit("whole", flags), fit("parts", flags, "--federation.rounds 2")
    assert cli(["fit", "--name", "parts", "--resume", "--federation.rounds", "3"]) == 0
    rows = [
        (folder / "metrics.csv").read_text().splitlines()[-1].split(",")[:4]
        for folder in (whole, parts)
    ]
    assert rows[0] == rows[1]
    assert cli(["export", "--run", str(whole), "--client", "1", "--out", "one.safetensors"]) == 0
    assert "adapters={'rank': 2" in Path("one.py").read_text()
    monkeypatch.chdir(whole.parents[1])
    made = {}
    exec(Path("one.py").read_text(), made)
    names = dict(made["model"].named_parameters())
    assert any("lora_B" in n and float(p.detach().abs().max()) > 0 for n, p in names.items())
