"""`fl-train deploy`: write a Flower app, after a rehearsal that compares its results with the
simulator's."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from fl_lightning.cli.resolve import complete, plan, to_yaml
from fl_lightning.cli.settings import read_line
from fl_lightning.configuration.config import Component, Config, check
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.files import whole_folder
from fl_lightning.results import owncode

CHECKPOINT = Component("fl_lightning.callbacks.checkpoint.Checkpoint", {"every": 1, "seconds": 0.0})
"""Of the centre: after every round, so that a centre that goes on asks for no round that a site has
left behind."""


def deploy(argv: list[str]) -> None:
    """Write the app's folder and, where they are asked for, files with the data of rehearsal sites.

    Raises:
        BadInput: the method, or something else, cannot be deployed.
        RunFailed: the rehearsal came to other numbers than the simulator.
    """
    line = read_line(argv, "deploy")
    values, folder = line.values, Path(line.values.out)
    check("out", values.out, not folder.exists(), "it exists; the app needs a new folder")
    sites = Path(values.sites) if values.sites is not None else None
    check(
        "sites",
        values.sites,
        sites is None or not sites.exists(),
        "it exists; the files need a new folder",
    )
    config = complete(plan(line.layers))
    kept = config.callbacks.get("checkpoint", CHECKPOINT)
    saved = Component(CHECKPOINT.class_path, kept.init_args | CHECKPOINT.init_args)
    config = replace(config, callbacks=config.callbacks | {"checkpoint": saved})
    from fl_lightning.data import prepare
    from fl_lightning.run import instantiate
    from fl_lightning.sites import app
    from fl_lightning.sites.center import check_deployable
    from fl_lightning.sites.data import Facts, with_loop, write_sites
    from fl_lightning.sites.rehearsal import repeatable

    check_deployable(
        config, [instantiate(f"callbacks.{name}", c) for name, c in config.callbacks.items()]
    )
    config = with_loop(config)
    if values.rehearse:
        _rehearse(config)
    if "localprivacy" in config.callbacks:
        config = repeatable(config, False)
        print("noise: every site draws it from its operating system, since all sites know the seed")
    data = prepare(config.data, config.federation.clients, config.seed, config.smoke)
    name = folder.name
    with whole_folder(folder):
        files = app.write(
            folder, name, to_yaml(config), Facts.of(data), owncode.read(owncode.paths(config))
        )
        if sites is not None:
            with whole_folder(sites):
                written = write_sites(data, sites)
    print(f"app: {folder} ({len(files)} files); the commands: {folder / 'README.md'}")
    if sites is not None:
        print(f"data of {len(written)} sites to rehearse with: {written[0]} to {written[-1].name}")


def _rehearse(config: Config) -> None:
    """Two rounds by messages, and the same by the simulator.

    Raises:
        BadInput: a hook reads what does not travel; it is named.
        RunFailed: they differ.
    """
    from fl_lightning.sites.rehearsal import differences, rehearse, short, simulate

    config = short(config)
    with tempfile.TemporaryDirectory() as made:
        unlike = differences(simulate(config, Path(made)), rehearse(config, Path(made)))
    clients, rounds = config.federation.clients, config.federation.rounds
    if unlike:
        raise RunFailed(
            f"the rehearsal differs from the simulator in {len(unlike)} cells; the first: "
            f"{unlike[0]}"
        )
    print(
        f"rehearsal: {rounds} rounds of {clients} clients by messages are bit-identical to the "
        f"simulator's"
    )
