"""Run folders made by hand: small, complete, and with figures that can be checked in the head."""

import numpy as np
import pytest
import yaml

from fl_lightning.results.result import MIB


def cells(table):
    """A table's rows by their heads."""
    return dict(zip(table.index, table.to_numpy().tolist(), strict=True))


LAYERS = ["conv", "norm", "head"]


def table(rows):
    """CSV text; an absent value is an empty cell."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    lines = [header, *([str(row.get(name, "")) for name in header] for row in rows)]
    return "".join(",".join(line) + "\n" for line in lines)


def relation(receivers, layers):
    """A client's weight on itself is 0.9, and the others' are alike."""
    n = len(receivers)
    rows = np.full((n, layers, n), 0.1 / max(1, n - 1), dtype=np.float32)
    rows[np.arange(n), :, np.arange(n)] = 0.9
    return rows


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
        counted=True,
        ended=True,
        config=None,
        summary="",
    ):
        path = tmp_path / name
        (path / "relation").mkdir(parents=True)
        (path / "traffic").mkdir()
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
                | (
                    {"channel_s": 3.0, "channel_download_s": 1.0, "channel_upload_s": 2.0}
                    if channel
                    else {}
                )
                | (
                    {"flops_forward": 10**9, "flops_backward": 2 * 10**9, "flops_server": 10**6}
                    if counted
                    else {}
                )
                | ({"flops_extra": 0, "flops_penalty": 0} if counted else {})
            )
            clients += [
                {"round": number, "client": c, "accuracy_after": accuracy - c / 100} for c in cohort
            ]
            np.savez_compressed(
                path / "relation" / f"round-{number:04d}.npz",
                rows=relation(list(cohort), len(LAYERS)),
                receivers=np.array(cohort),
                layers=np.array(LAYERS),
                sources=np.array(cohort),
            )
            sizes = np.zeros((n, 2, len(LAYERS) + 1, 4), dtype=np.int64)
            sizes[:, :, :3, 0] = 1000
            sizes[:, 1, 2, 0] = 0  # the head stays at home
            sent = np.broadcast_to(np.array([[True, True, True], [True, False, False]]), (n, 2, 3))
            kinds = np.array(["parameters", "buffers", "statistics", "other"])
            named = {"sent": sent, "layers": np.array(LAYERS), "kinds": kinds}
            np.savez_compressed(
                path / "traffic" / f"round-{number:04d}.npz", bytes=sizes, clients=cohort, **named
            )
        (path / "columns.json").write_text('{"mean_accuracy": {"model": "after"}}')
        (path / "metrics.csv").write_text(table(metrics))
        (path / "clients.csv").write_text(table(clients))
        if ended:
            (path / "final.csv").write_text(
                table([{"client": c, "accuracy": 0.9 - c / 10} for c in range(4)])
            )
            facts = (
                f'"rounds": {rounds}, "judge": "after", "final_kinds": {{"after": 4}}, '
                f'"final_mean_accuracy": 0.75'
            )
            (path / "summary.json").write_text(f"{{{facts}{summary}}}")
        return path

    return make
