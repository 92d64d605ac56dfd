"""Clients that are held out: by each kind of rule they get the same model on two processes, and
after a break."""

from pathlib import Path

import pytest

from fl_lightning.cli import main

from .test_contract import NEEDS

RULES = (
    "fedavg",
    "fedem",
    "fedmd",
    "fedrep",
    "fesem",
    "kapc",
    "knnper",
    "local",
    "perfedavg",
    "pfedhn",
)
"""One method for each kind of rule; tests/test_newcomers.py has them all, in one process."""
HELD = "--data.held_out_clients 0.2 --evaluation.newcomer_samples [0,5]"


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_unseen_clients_on_two_processes_and_after_a_break(
    fit,
    small,
    on_ranks,
    record,
    name,
):
    flags = f"--method {name} {NEEDS.get(name, '')} {HELD}"
    on_ranks(2, small("two", flags))
    one = record(fit("one", flags))
    assert len(one.newcomers) == 2
    assert record(Path("runs/two")) == one, "two processes"
    fit("parts", flags, "--federation.rounds 2")
    assert record(fit("parts", flags, "--resume")) == one, "resumed"


FAILING = (
    "--method fedavg --data.held_out_clients 0.2 --evaluation.newcomer_samples [1,20] --callbacks "
    "fl_own_models.Picky"
)


def test_a_held_out_client_that_fails_has_no_score_or_ends_the_run(
    fit,
    small,
    record,
    capsys,
):
    one = record(fit("one", FAILING, "--federation.on_bad_client skip"))
    line = (
        "held-out client 1 failed in round 3, stage download: ValueError: too few samples to whiten"
    )
    (named,) = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("held-out")
    ]
    assert (
        named == f"{line} (traceback in failure.txt); with 1 samples of each class it has no score"
    )
    few, many = one.newcomers
    assert few["accuracy"] == "" and float(many["accuracy"]) > 0.3
    assert main(small("two", FAILING)) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"fl-train: error: {line}")


@pytest.mark.slow
def test_a_held_out_client_that_fails_on_two_processes(
    fit,
    small,
    on_ranks,
    record,
):
    flags = f"{FAILING} --federation.on_bad_client skip"
    on_ranks(2, small("two", flags))
    assert record(Path("runs/two")) == record(fit("one", flags))


@pytest.mark.slow
def test_models_that_diverge_after_the_rounds_have_no_score(fit, table, capsys):
    """Few steps in each round, many for fine-tuned copies and newcomers, and a weight decay that
    multiplies by -2."""
    flags = (
        "--method fedavg --federation.rounds 2 --federation.local_epochs null "
        "--federation.local_steps 3"
    )
    flags += " --optimizer.weight_decay 60 --optimizer.lr 0.05 --evaluation.models [finetuned]"
    flags += " --evaluation.finetune_epochs 100"
    flags += (
        " --data.held_out_clients 0.2 --evaluation.newcomer_samples [0,20] "
        "--evaluation.newcomer_rounds 150"
    )
    folder = fit("a", flags, "--federation.on_bad_client skip")
    lines = capsys.readouterr().err.splitlines()
    assert (
        sum(
            "its fine-tuned copy is not finite; lower optimizer.lr; not judged" in line
            for line in lines
        )
        >= 4
    )
    received, trained = table(folder, "newcomers.csv")
    assert received["accuracy"] != "" == trained["accuracy"]
    assert any(
        "its model is not finite" in line and line.startswith("held-out client 1") for line in lines
    )
