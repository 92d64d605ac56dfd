import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from fl_lightning.callbacks.progress import Progress
from fl_lightning.configuration.config import DataConfig
from fl_lightning.results.folder import RunFolder

from . import rounds


class KAPC:
    pass


def run_of(tmp_path, resumed_from=0):
    return SimpleNamespace(
        is_main=True,
        folder=tmp_path,
        resumed_from=resumed_from,
        rounds=3,
        clients=4,
        world_size=1,
        method=KAPC(),
        judge="after",
        config=SimpleNamespace(data=DataConfig()),
    )


def record(round, accuracy):
    metrics = {
        "train_loss": 0.5,
        "seconds": 2.0,
        "seconds_client": 1.5,
        "memory_mib": 100.0 * round,
    }
    for way in ("upload", "download"):
        metrics |= {f"{way}_bytes": 2.0**20, f"{way}_parameter_bytes": 2.0**19}
    if accuracy is not None:
        metrics |= {
            "mean_accuracy": accuracy,
            "worst_accuracy": accuracy / 2,
            "std_accuracy": 0.01 * round,
        }
        metrics |= {"accuracy_before": 0.9 - accuracy, "accuracy_after": accuracy}
    return rounds.record(round, [0, 1], metrics)


def show(run, shown, accuracies, ended=True):
    shown.on_fit_start(run)
    for round, accuracy in accuracies.items():
        shown.on_round_start(run, round, [0, 1])
        for client in (0, 1):
            shown.on_client_end(run, client)
        shown.on_round_end(run, record(round, accuracy))
    summary = {}
    if ended:
        shown.on_fit_end(run, summary)
        summary |= {
            "final_mean_accuracy": 0.4321,
            "mean_best_accuracy": 0.5678,
            "judge": "after",
            "final_kinds": {"after": 3, "before": 1},
            "wandb": "wandb sync there",
        }  # later callbacks add to it
    shown.on_close(run)


def cells(text, label):
    (line,) = [line for line in text.splitlines() if label in line]
    return line.replace("│", " ").partition(label)[2].split()


def test_without_a_terminal_one_plain_line_a_round(tmp_path, capsys):
    show(run_of(tmp_path), Progress(), {1: 0.5, 2: None, 3: 0.25})
    assert capsys.readouterr().err.splitlines() == [
        "round 1/3: mean accuracy 0.5000 (best 0.5000 in round 1), loss 0.5000, 2.0 s",
        "round 2/3: not judged, loss 0.5000, 2.0 s",
        "round 3/3: mean accuracy 0.2500 (best 0.5000 in round 1), loss 0.5000, 2.0 s",
    ]


def test_a_resumed_run_counts_what_was_before(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    for round, accuracy in ((1, 0.75), (2, 0.125)):  # round 2 will be run again
        folder.append(record(round, accuracy))
    show(run_of(tmp_path, resumed_from=1), Progress(), {2: 0.5, 3: 0.25})
    said = capsys.readouterr()
    assert "best 0.7500 in round 1" in said.err
    assert cells(said.out, "after local training *") == ["0.7500", "1", "0.2500"]
    assert "3.0 MiB up" in said.out


def test_a_terminal_gets_a_bar_that_moves_with_the_clients(tmp_path):
    progress, run = Progress(), run_of(tmp_path)
    screen = io.StringIO()
    progress._console = Console(file=screen, force_terminal=True, width=120)
    progress.on_fit_start(run)
    bar = progress._bar
    done = []
    progress.on_round_start(run, 2, [0, 1])
    for client in (0, 1):
        progress.on_client_end(run, client)
        done.append(bar.tasks[0].completed)
    progress.on_round_end(run, record(2, 0.5))
    assert done == pytest.approx([1.5, 2.0])
    assert bar.tasks[0].completed == 2
    bar.refresh()
    assert "round 2/3" in screen.getvalue()
    assert "mean accuracy 0.5000 (best 0.5000 in round 2)" in screen.getvalue()
    progress.on_close(run)
    assert bar.finished or not bar.live.is_started
