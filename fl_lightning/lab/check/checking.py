"""The command `fl-train check-method`: trains short runs of a method and prints a line for each
check."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.catalogue import did_you_mean
from fl_lightning.configuration.config import Config, check
from fl_lightning.configuration.files import Layer
from fl_lightning.configuration.resolve import resolve
from fl_lightning.foundation.errors import BadInput, RunFailed

BASE: Layer = {
    "model": {"name": "mlp", "hidden": [16]},
    "federation": {
        "clients": 5,
        "rounds": 4,
        "local_epochs": 1,
    },
    "data": {
        "fraction": 0.4,
        "validation": 0.2,
        "public": "held_back",
    },
    "fabric": {
        "accelerator": "cpu",
        "devices": 1,
        "threads": 1,
    },
    "callbacks": {"heatmaps": None, "progress": None},
}
"""Settings under the user's: some 700 digits of five clients, a few seconds for all runs. A part of
the data is for validation and another is public, since some methods need them."""
SAVED: Layer = {
    "callbacks": {
        "checkpoint": {
            "every": 1,
            "best": False,
            "seconds": 0,
        }
    }
}
"""Settings over the user's: a checkpoint after each round."""
WIDTH = 12
"""Columns of a check's name in the output."""
QUICK = ("runs", "seed", "resume", "partial", "skip", "bytes")
"""The checks of `--quick`: they need no second process, no other data and no other networks."""


def check_method(
    method: str,
    only: str | None,
    quick: bool,
    out: str | None,
    layers: list[Layer],
) -> None:
    """Runs the checks and prints a line for each: its result, or what is wrong and why.

    Args:
        method: name or import path.
        only: names of checks, with commas; None: all.
        quick: whether to run the checks of `QUICK` in three rounds.
        out: folder for the runs; None: a temporary one.
        layers: settings of the user.

    Raises:
        BadInput: there is no such method, or it refuses these settings.
        RunFailed: some checks fail.
    """
    config = _config(method, [{"federation": {"rounds": 3}}, *layers] if quick else layers)
    is_new = out is None or not Path(out).exists()
    check("out", out, is_new, "it exists; give a new folder")
    from fl_lightning.lab.check.checks import NAMES

    check(
        "quick",
        quick,
        not (quick and only),
        "give --quick or --only, not both",
    )
    chosen = only or ",".join(QUICK if quick else NAMES)
    names = [name.strip() for name in chosen.split(",")]
    for name in names:
        check(
            "only",
            name,
            name in NAMES,
            f"no such check{did_you_mean(name, NAMES)}; checks: {', '.join(NAMES)}",
        )
    folder = contextlib.nullcontext(out) if out is not None else tempfile.TemporaryDirectory()
    with folder as place:
        Path(place).mkdir(parents=True, exist_ok=True)
        failed = _failed_checks(config, Path(place), names)
    if failed:
        raise RunFailed(f"{method}: {len(failed)} of {len(names)} checks fail: {', '.join(failed)}")


def _config(method: str, layers: list[Layer]) -> Config:
    """Returns the base config of the check runs."""
    class_path = catalogue.find("methods", "method", method).class_path
    settings = [_without_other_method(layer, class_path) for layer in layers]
    config = resolve([BASE, {"method": method}, *settings, SAVED])
    rounds, clients = config.federation.rounds, config.federation.clients
    check(
        "federation.rounds",
        rounds,
        rounds >= 3,
        "it must be at least 3, since a check lets client 1 fail in round 2",
    )
    check(
        "federation.clients",
        clients,
        config.clients >= 3,
        "it must be at least 3",
    )
    return config


def _without_other_method(layer: Layer, class_path: str) -> Layer:
    """Returns the settings without their method if that is not the checked method `class_path`."""
    method = layer.get("method")
    name = method
    if isinstance(method, dict):
        name = method.get("name") or method.get("class_path")
    if not isinstance(name, str):
        return layer
    if catalogue.find("methods", "method", name).class_path == class_path:
        return layer
    return {key: value for key, value in layer.items() if key != "method"}


def _failed_checks(
    config: Config,
    folder: Path,
    names: list[str],
) -> list[str]:
    """Run the checks `names`, print their results, and return the names of those that fail."""
    from fl_lightning.lab.check.bench import Bench, CheckFailed
    from fl_lightning.lab.check.checks import CHECKS

    bench, failed = Bench(config, folder), []
    for one_check in CHECKS:
        name = one_check.name
        if name not in names:
            continue
        try:
            verdict, result = "ok", one_check.run(bench)
        except BadInput as error:
            if not bench.runs:
                raise  # the method refuses even the base config
            verdict, result = "refused", f"in one line: {error}"
        except CheckFailed as error:
            verdict, result = "FAILS", str(error)
            failed.append(name)
        print(f"{verdict:8}{name:{WIDTH}} {one_check.claim}: {result}", flush=True)
        if name == "runs" and failed:
            print("the other checks are not made: they would say the same")
            break
    return failed
