"""Python at par with the command line: data, models and methods of a script, studies, predictions
on raw samples."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from classes import Ditto, FedRoD
from lightning import LightningDataModule
from refusals import refuses
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fl_lightning
from fl_lightning import Run, fit
from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import arrays
from fl_lightning.data.given import keep

X, Y = load_digits(return_X_y=True)
X, Y = X[:600].reshape(-1, 8, 8).astype(np.float32), Y[:600]
SITES = np.array(["north", "south", "west"])[np.arange(600) % 3]
NAMES = np.array([f"digit {k}" for k in range(10)])
QUIET = {
    "loggers": None,
    "callbacks": {"heatmaps": None, "progress": None},
    "fabric.accelerator": "cpu",
    "fabric.threads": 1,
    "federation.rounds": 2,
    "federation.local_epochs": 1,
}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


class Sites(Dataset[Any]):
    """Samples of three sites."""

    def __init__(self, index: range):
        self.index = list(index)

    def __len__(self):
        return len(self.index)

    def __getitem__(self, k):
        at = self.index[k]
        return torch.from_numpy(X[at][None]), int(Y[at]), str(SITES[at])


class Module(LightningDataModule):
    """The same with a test part of its own and names of classes."""

    class_names = NAMES.tolist()

    def train_dataloader(self):
        return DataLoader(Sites(range(450)), batch_size=7, shuffle=True)

    def test_dataloader(self):
        return DataLoader(Sites(range(450, 600)))


def test_arrays_a_model_and_a_method_of_a_script():
    """Client names make the natural partition; the model's weights are the first ones; nothing is
    fitted twice."""
    net = network()
    run = fit(QUIET, data=(X, NAMES[Y], SITES), model=net, method=Ditto(lam=0.5))
    assert run.config["method"] == {
        "name": "ditto",
        "init_args": {"lam": 0.5, "personal_epochs": None},
    }
    assert run.config["federation"]["clients"] == 3 and run.config["data"]["partition"] == "natural"
    assert run.split["train_samples"].tolist() == [160, 160, 160] and run.rounds_done == 2
    kept = torch.load(run.config["model"]["init_args"]["file"], weights_only=False)
    assert all(
        torch.equal(a, b)
        for a, b in zip(kept.state_dict().values(), net.state_dict().values(), strict=True)
    )
    guessed = run.predict("north", X[SITES == "north"])
    assert set(guessed) <= set(NAMES) and (guessed == NAMES[Y][SITES == "north"]).mean() > 0.3
    again = fit(
        {**QUIET, "federation.rounds": 3, "name": run.folder.name, "resume": True},
        data=(X, NAMES[Y], SITES),
        model=network(),
        method=Ditto(lam=0.5),
    )
    assert (
        again.rounds["round"].tolist() == [1, 2, 3] and len(list(Path("runs/given").iterdir())) == 2
    )


@pytest.mark.sampled("crosskapc")
@pytest.mark.parametrize("method", [None, "fedbn", FedRoD()], ids=["crosskapc", "fedbn", "fedrod"])
def test_predictions_on_raw_samples_are_the_runs_own_scores(method):
    """Of the method's own outputs, too: FedRoD adds two heads."""
    run = fit(QUIET, data=Module(), method=method)
    x, y = X[450:], NAMES[Y][450:]
    for client, site in enumerate(("north", "south", "west")):
        here = SITES[450:] == site
        share = (run.predict(client, x[here][:, None]) == y[here]).mean()
        assert share == pytest.approx(run.final_accuracies[client], abs=1e-6)
    model = Run(run.folder).model(1)
    assert isinstance(model, nn.Module) and model.class_names == NAMES.tolist()
    scores = model(torch.from_numpy(x[:4]))
    assert scores.shape[0] == 4 and model(x[:4, :, :, None]).equal(scores)


def test_a_data_set_and_plain_pairs():
    run = fit(QUIET, data=Sites(range(300)))
    assert len(run.split) == 3 and run.setting("data.source") == "arrays"
    assert run.folder.name.startswith("crosskapc-given-")
    pairs = TensorDataset(torch.from_numpy(X[:, None]), torch.from_numpy(Y))
    run = fit({**QUIET, "federation.clients": 4, "data.partition": "iid"}, data=pairs)
    assert len(run.split) == 4


@pytest.mark.parametrize("kind", ["int64", "uint8"])
def test_clients_that_are_numbers_are_in_their_order(kind, tmp_path):
    """As text, 10 comes before 2, and the model of client 2 was that of client 10."""
    _, settings = keep((X, Y, (np.arange(600) % 12).astype(kind)), tmp_path)
    source = arrays.load(DataConfig(source="arrays", root=settings["data"]["root"]))
    assert (
        source.group_names == [str(k) for k in range(12)]
        and settings["federation"]["clients"] == 12
    )


@pytest.mark.parametrize(
    "given, line",
    [
        (
            {"data": (X, Y[:5])},
            r"^data='train': x, y, client and unit must have one length, not \[5, 600\]",
        ),
        (
            {"data": (X, Y - 1)},
            r"^data='y: int64, shape \(600,\)': y must hold class numbers from 0 "
            r"or class names",
        ),
        (
            {"data": (X[:3], np.array(["a", None, "b"], object))},
            r"^data='y': sample 2 has no y \(None or NaN\)",
        ),
        (
            {"data": (X[:2], Y[:2], [1.0, np.nan])},
            r"^data='client': sample 2 has no client",
        ),
        ({"data": X}, r"^data='ndarray': give \(x, y\), \(x, y, client\)"),
        (
            {"data": (X, Y, SITES), "method": "dito"},
            r"^method='dito': no such name \(did you mean ditto",
        ),
        ({"model": 3}, r"^model='int': it must be a torch.nn.Module"),
        (
            {"data": (X, Y, SITES), "model": nn.Linear(3, 10)},
            r"^model=.* on which its forward fails",
        ),
    ],
)
def test_what_cannot_work_leaves_no_file(given, line, workplace):
    with refuses(line):
        fit(QUIET, **given)
    assert list(workplace.iterdir()) == []


def test_given_twice_or_beside_flags_is_refused():
    with refuses(r"^method='ditto': it is set both in the config and by keyword"):
        fit({**QUIET, "method": "ditto"}, method="fedavg")
    with refuses("it must be a mapping or a file"):
        fit(["--seed=1"], data=(X, Y, SITES))
    with refuses("there is no client 'nort'; names: north, south, west"):
        (run := fit(QUIET, data=(X, Y, SITES))).predict("nort", X)
    for client in (1.7, True, None):
        with refuses(f"client={client}: it must be a client's number"):
            run.predict(client, X)  # type: ignore[arg-type]
    with refuses("checkpoint='first': it must be last or best"):
        run.model(0, "first")  # type: ignore[arg-type]


def test_keywords_go_over_the_base_of_a_mapping(workplace):
    """The base's method was trained, and its number of clients was taken, in place of what the call
    gave."""
    mapping = {**QUIET, "base": "kapc_digits"}
    run = fit(mapping, data=(X, Y, SITES), method="fedavg")
    assert (run.config["method"]["name"], run.config["data"]["source"]) == ("fedavg", "arrays")
    assert run.config["federation"]["clients"] == 3 and run.config["federation"]["rounds"] == 2
    for given in ({"data.source": "digits"}, {"data": {"root": "other"}}):
        with refuses(r"^data\.(source|root)='\w+': it is set both in the config and by keyword"):
            fit({**QUIET, **given}, data=(X, Y, SITES))


def test_what_a_study_refuses_in_its_process_is_bad_input(workplace):
    definition = {"base": "digits", "methods": ["fedavg"], "seeds": [0]}
    with refuses(r"^methods='ditto': the study has no such method"):
        fl_lightning.study(definition, "studies/a", methods="ditto")
    assert not (workplace / "studies").exists()
