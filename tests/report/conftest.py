"""Run folders made by hand: small, complete, and with figures that can be checked in the head."""

import numpy as np
import pytest
import yaml

from fl_lightning.foundation.csvtable import CsvTable
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.record import RelationView, RoundRecord
from fl_lightning.results.result import MIB


def cells(table):
    """A table's rows by their heads."""
    return dict(zip(table.index, table.to_numpy().tolist(), strict=True))


LAYERS = ["conv", "norm", "head"]


def relation(receivers, layers):
    """A client's weight on itself is 0.9, and the others' are alike."""
    n = len(receivers)
    rows = np.full((n, layers, n), 0.1 / max(1, n - 1), dtype=np.float32)
    rows[np.arange(n), :, np.arange(n)] = 0.9
    return rows


def change(path, **settings):
    """Writes other settings into the config of a run, and returns its folder."""
    config = yaml.safe_load((path / "config.yaml").read_text())
    (path / "config.yaml").write_text(yaml.safe_dump(config | settings))
    return path


@pytest.fixture(autouse=True)
def _undrawn(request, monkeypatch):
    """Pages have empty charts, but in a browser: to lay them out takes seconds."""
    if "browser" not in request.fixturenames:
        monkeypatch.setattr("fl_lightning.lab.report.vector.svg", lambda name, figure: "<svg/>")


@pytest.fixture
def make_run(tmp_path):
    """Makes a run folder; each round: 1 MiB up and 1 MiB down by every client, 2 s, 3 modelled s if
    asked for."""

    def make(
        name="run",
        accuracies=(0.1, 0.5, 0.8),
        cohort=(0, 1, 2, 3),
        asked=None,
        channel=False,
        config=None,
        summary="",
    ):
        path = tmp_path / name
        path.mkdir(parents=True)
        folder = RunFolder(path)
        rounds, n = len(accuracies), len(cohort)
        settings = {
            "seed": 0,
            "method": {"name": "kapc", "init_args": {"lam": 0.1}},
            "model": {"name": "mlp"},
            "federation": {
                "rounds": asked or rounds,
                "clients": 4,
                "participation": 1.0,
                "local_epochs": 1,
            },
            "data": {"source": "digits", "partition": "dirichlet", "alpha": 0.1, "root": None},
            "evaluation": {"judge": "auto"},
        }
        (path / "config.yaml").write_text(yaml.safe_dump(settings | (config or {})))
        channel_seconds = {"channel_s": 3.0, "channel_download_s": 1.0, "channel_upload_s": 2.0}
        operations = {"flops_forward": 10**9, "flops_backward": 2 * 10**9, "flops_server": 10**6}
        operations |= {"flops_extra": 0, "flops_penalty": 0}
        metrics, clients = [], []
        for number, accuracy in enumerate(accuracies, start=1):
            metrics.append(
                {
                    "round": number,
                    "mean_accuracy": accuracy,
                    "worst_accuracy": accuracy / 2,
                    "accuracy_before": accuracy / 4,
                    "accuracy_after": accuracy,
                    "upload_bytes": n * MIB,
                    "download_bytes": n * MIB,
                    "upload_parameter_bytes": n * MIB // 2,
                    "download_parameter_bytes": n * MIB // 2,
                    "seconds": 2.0,
                    "seconds_client": 1.5,
                    "seconds_server": 0.25,
                    "seconds_evaluation": 0.25,
                    "memory_mib": 100.0 + number,
                }
                | (channel_seconds if channel else {})
                | operations
            )
            clients += [
                {"round": number, "client": c, "accuracy_after": accuracy - c / 100} for c in cohort
            ]
            view = RelationView(relation(list(cohort), len(LAYERS)), cohort, LAYERS, cohort)
            folder.write_relation(number, view)
            sizes = np.zeros((n, 2, len(LAYERS) + 1, 4), dtype=np.int64)
            sizes[:, :, :3, 0] = 1000
            sizes[:, 1, 2, 0] = 0  # the head stays at home
            sent = np.broadcast_to(np.array([[True, True, True], [True, False, False]]), (n, 2, 3))
            rows = clients[-n:]
            folder.write_traffic(RoundRecord(number, cohort, {}, rows, view, LAYERS, sizes, sent))
        (path / "columns.json").write_text('{"mean_accuracy": {"model": "after"}}')
        CsvTable(path / "metrics.csv").write(metrics)
        CsvTable(path / "clients.csv").write(clients)
        final = [{"client": c, "accuracy": 0.9 - c / 10} for c in range(4)]
        CsvTable(path / "final.csv").write(final)
        facts = (
            f'"rounds": {rounds}, "judge": "after", "final_kinds": {{"after": 4}}, '
            f'"final_mean_accuracy": 0.75'
        )
        (path / "summary.json").write_text(f"{{{facts}{summary}}}")
        return path

    return make
