"""FedAvg of Apple's pfl-research beside fl_lightning's: same clients, first weights and cohorts, privacy of a client.

    uv venv pfl && uv pip install --no-config --python pfl/bin/python pfl torch
    pfl/bin/python benchmarks/pfl_beside.py DIR

DIR has a file for each seed, as `pfl_export.py STUDY DIR` writes it: samples, weights, a study's rows, noise, scores.
pfl-research runs each row with `same numbers`: fl_lightning's random numbers, scaled and added by pfl-research; `same
noise`: numbers of its own; `own cohorts`: also cohorts of its own sampler, with replacement; `own account`: as `same
noise`, but as much as its PLD accountant says. Prints accuracy, mean over clients, with Student's interval of 95 % over
seeds, and the difference to fl_lightning's, paired by seed. `final`: a client's model after the local training of its
last round, the global one where it never took part (`evaluation.judge: after`); `global`: the last global model;
`tuned`: that one after local training of each client. CPU; two minutes a seed.
"""

import os
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.bridge import FrameworkBridgeFactory
from pfl.internal.ops import pytorch_ops
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism, PLDPrivacyAccountant
from scipy.stats import t as student
from torch import nn

OURS, DRAWN = "fl_lightning", pytorch_ops.add_gaussian_noise


class MLP(nn.Sequential):
    def metrics(self, x, y):
        return {}

    def loss(self, x, y):
        return nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def accuracy(self, x, y):
        return float((self(x).argmax(1) == y).double().mean())


class Scored(FederatedAveraging):  # its `scores`: each client's model after its last local training
    def train_one_user(self, initial_model_state, model, user_dataset, central_context):
        trained = super().train_one_user(initial_model_state, model, user_dataset, central_context)
        self.scores[user_dataset.user_id] = model.pytorch_model.accuracy(*self.test[user_dataset.user_id])
        return trained


class Row:
    """A row of the study with one seed: `z` has its arrays."""

    def __init__(self, z, name):
        self.cohorts, self.normal, self.initial = z["cohorts"], under(z, "normal/"), under(z, "initial/")
        self.train, self.test = clients(z, "train"), clients(z, "test")
        keys = ("lr", "epochs", "batch", "noise", "clip", "epsilon", "delta")
        lr, epochs, batch, self.noise, self.clip, *self.budget = (z[f"{name}/{key}"].item() for key in keys)
        self.local = NNTrainHyperParams(local_num_epochs=epochs, local_learning_rate=lr, local_batch_size=batch)
        self.final, self.scores, self.everyone = under(z, f"{name}/final/"), z[f"{name}/scores"], range(len(self.train))

    def of_global(self, model):
        """Mean accuracy of the global model, and after local training."""
        start, scores = model.get_parameters(), []
        for part, test in zip(self.train, self.test, strict=True):
            before = model.pytorch_model.accuracy(*test)
            FrameworkBridgeFactory.sgd_bridge().do_sgd(model, Dataset(part), self.local)
            scores.append((before, model.pytorch_model.accuracy(*test)))
            model.set_parameters(start)
        return np.mean(scores, 0).tolist()

    def pfl(self, variant, seed):
        """A run of pfl-research: noise, scores, and how far the global model is from fl_lightning's at most."""
        np.random.seed(seed)
        (rounds, size), given = self.cohorts.shape, iter(self.cohorts.flatten().tolist())
        sampler = get_user_sampler("random", self.everyone) if variant == "own cohorts" else lambda: next(given)
        mechanism = GaussianMechanism(self.clip, self.noise)
        if variant == "own account":
            account = PLDPrivacyAccountant(rounds, size / len(self.everyone), "gaussian", *self.budget)
            mechanism = GaussianMechanism.from_privacy_accountant(account, self.clip)
        normal = zip(*self.normal.values(), strict=True)
        same = lambda xs, stddev, seed: [x + stddev * n for x, n in zip(xs, next(normal), strict=True)]  # noqa: E731
        pytorch_ops.add_gaussian_noise = same if variant == "same numbers" else DRAWN
        data = FederatedDataset(lambda client: Dataset(self.train[client], user_id=client), sampler)
        steps = [WeightByUser()] + [CentrallyAppliedPrivacyMechanism(mechanism)] * (self.noise > 0)
        algorithm, model = Scored(), wrapped(self.initial)
        algorithm.test, algorithm.scores, net = self.test, {}, model.pytorch_model
        params = NNAlgorithmParams(rounds, rounds, size, None)
        algorithm.run(params, SimulatedBackend(data, data, steps), model, self.local, send_metrics_to_platform=False)
        scores = [algorithm.scores.get(c, net.accuracy(*test)) for c, test in enumerate(self.test)]
        apart = max(float((a.data - b).abs().max()) for a, b in zip(net.parameters(), self.final.values(), strict=True))
        return mechanism.relative_noise_stddev, np.mean(scores), *self.of_global(model), apart


def under(z, prefix):
    return {name.removeprefix(prefix): torch.from_numpy(z[name]) for name in z if name.startswith(prefix)}


def clients(z, part):
    x, y, mean, std = (torch.from_numpy(z[name]) for name in (f"x_{part}", f"y_{part}", "mean", "std"))
    sizes = z[f"n_{part}"].tolist()
    return list(zip(((x.float() - mean) / std).flatten(1).split(sizes), y.split(sizes), strict=True))


def wrapped(state):
    shapes = [value.shape for value in state.values() if value.ndim == 2]
    net = MLP(*[layer for rows, columns in shapes for layer in (nn.Linear(columns, rows), nn.ReLU())][:-1])
    net.load_state_dict(dict(zip(net.state_dict(), state.values(), strict=True)))
    return PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))


def interval(values):
    half = student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.2f} ({np.mean(values) - half:.2f} to {np.mean(values) + half:.2f})"


def main(folder):
    table = {}
    for path in sorted(folder.glob("seed-*.npz")):
        z, seed = dict(np.load(path)), int(path.stem.removeprefix("seed-"))
        for name in [key.removesuffix("/scores") for key in z if key.endswith("/scores")]:
            row = Row(z, name)
            known = row.noise, row.scores.mean(), *row.of_global(wrapped(row.final)), 0.0
            table.setdefault((name, OURS), []).append(known)
            for variant in ("same numbers", "same noise", "own cohorts", "own account")[:: 1 if row.noise else 2]:
                table.setdefault((name, variant), []).append(row.pfl(variant, seed))
                print(name, variant, f"seed {seed}:", *table[name, variant][-1], file=sys.stderr)
    print(f"pfl {version('pfl')}, torch {torch.__version__}, dp-accounting {version('dp-accounting')}\n")
    scores = [f"{score}, {what}" for score in ("final", "global", "tuned") for what in ("%", "difference")]
    heads = ["row", "by", "noise", *scores, "models differ by"]
    print(f"| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|")
    for (name, by), runs in table.items():
        got, ours = 100 * np.array(runs), 100 * np.array(table[name, OURS])
        cells = [interval(x[:, k]) for k in (1, 2, 3) for x in (got, got - ours)]
        noises = ", ".join(sorted({f"{values[0]:.3f}" for values in runs}))
        print(f"| {name} | {by} | {noises} | {' | '.join(cells)} | {got[:, 4].max() / 100:.1e} |")


if __name__ == "__main__":
    os.environ["PFL_PYTORCH_DEVICE"] = "cpu"
    main(Path(sys.argv[1]))
