"""A LightningModule of a user, without editing the project."""


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


def test_mnist(fit, table, fl_data):
    flags = f"--config kapc_mnist --loggers null --data.root {fl_data} --data.fraction 0.02"
    more = "--federation.clients 4 --federation.rounds 2 --model mlp --optimizer.lr 0.05"
    folder = fit("a", flags, more, "--federation.local_epochs 3")
    assert float(table(folder)[-1]["mean_accuracy"]) > 0.6
