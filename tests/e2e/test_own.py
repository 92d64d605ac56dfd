"""A user's own models and data, without editing the project."""

import numpy as np


def test_own_module(fit, table):
    folder = fit("a", "--model fl_own_models.Normed --model.width 6 --federation.local_epochs 3")
    accuracies = [float(row["mean_accuracy"]) for row in table(folder)]
    assert accuracies[-1] > 0.6
    with np.load(folder / "relation" / "round-0001.npz") as held:
        assert held["layers"].tolist() == ["conv", "out"]
    # The papers' byte counts: convolution and classifier go down, BatchNorm goes up only,
    # statistics stay.
    shared, norm = 6 * 9 + 6 + 54 * 10 + 10, 12
    (first, *_) = table(folder, "clients.csv")
    assert (int(first["download_bytes"]), int(first["upload_bytes"])) == (
        4 * shared,
        4 * (shared + norm),
    )


def test_own_lightning_module_trains_by_its_own_rules(fit, table):
    import fl_own_models

    fl_own_models.Lit.steps = fl_own_models.Lit.optimizers_made = 0
    flags = "--model fl_own_models.Lit --federation.local_epochs 3"
    own = table(fit("a", flags, "--optimizer.name module"))
    assert fl_own_models.Lit.steps > 0 and fl_own_models.Lit.optimizers_made == 1
    assert float(own[-1]["mean_accuracy"]) > 0.6
    sgd = table(fit("b", flags, "--federation.rounds 1"))
    assert fl_own_models.Lit.optimizers_made == 1
    assert sgd[0]["train_loss"] != own[0]["train_loss"]
