"""Writes a Flower app for a configuration, after a rehearsal against the simulator."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from fl_lightning.configuration.config import Component, Config, check
from fl_lightning.configuration.resolve import to_yaml
from fl_lightning.data import imbalance, prepare
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.files import whole_folder
from fl_lightning.results import owncode
from fl_lightning.run import instantiate
from fl_lightning.sites import app
from fl_lightning.sites.center import check_deployable
from fl_lightning.sites.data import SiteFacts, with_loop, write_sites
from fl_lightning.sites.rehearsal import differences, rehearse, simulate, two_rounds_of, with_noise

CHECKPOINT = Component("fl_lightning.callbacks.checkpoint.Checkpoint", {"every": 1, "seconds": 0.0})
"""The centre saves after every round: once resumed, it never asks for a round that sites have
left behind."""


@dataclass(frozen=True)
class Deployed:
    """The files that `deploy` wrote: those of the app and of the sites' data, with notes for the
    user. Its text lists them."""

    folder: Path
    app: list[Path]
    sites: list[Path]
    notes: list[str]

    def __str__(self) -> str:
        readme = self.folder / "README.md"
        lines = [*self.notes, f"app: {self.folder} ({len(self.app)} files); the commands: {readme}"]
        if self.sites:
            first = self.sites[0]
            last = self.sites[-1].name
            lines.append(f"data of {len(self.sites)} sites to rehearse with: {first} to {last}")
        return "\n".join(lines)


def deploy(
    config: Config,
    out: str | Path,
    *,
    sites: str | Path | None = None,
    rehearse: bool = True,
) -> Deployed:
    """Write the Flower app of `config` to the new folder `out`.

    Args:
        config: the resolved configuration.
        out: the app's folder; the run gets its name.
        sites: a new folder for the configuration's data, one file for each client; None: the data
            are not written.
        rehearse: whether to run two rounds first, by messages and in the simulator, and compare
            their results.

    Raises:
        BadInput: the configuration cannot be deployed, or a folder exists.
        RunFailed: the rehearsal's results differ from the simulator's.
    """
    folder = Path(out)
    check("out", str(out), not folder.exists(), "it exists; the app needs a new folder")
    if sites is not None:
        exists = Path(sites).exists()
        check("sites", str(sites), not exists, "it exists; the files need a new folder")
    checkpoint = config.callbacks.get("checkpoint", CHECKPOINT)
    checkpoint = Component(CHECKPOINT.class_path, checkpoint.init_args | CHECKPOINT.init_args)
    config = replace(config, callbacks=config.callbacks | {"checkpoint": checkpoint})
    components = config.callbacks.items()
    check_deployable(config, [instantiate(f"callbacks.{name}", c) for name, c in components])
    config = with_loop(config)
    data = prepare(
        config.data,
        config.federation.clients,
        config.seed,
        config.smoke,
    )
    config = imbalance.with_metric(config, data)  # its server will not know the classes' shares
    notes = []
    if rehearse:
        notes.append(_rehearsed(two_rounds_of(config)))
    if "localprivacy" in config.callbacks:
        config = with_noise(config, reproducible=False)
        notes.append(
            "privacy noise: every site draws it from its operating system's random numbers, since "
            "all sites know the seed"
        )
    source = owncode.read(owncode.paths(config))
    site_files: list[Path] = []
    with whole_folder(folder):
        files = app.write(
            folder,
            folder.name,
            to_yaml(config),
            SiteFacts.of(data),
            source,
        )
        if sites is not None:
            with whole_folder(Path(sites)):
                site_files = write_sites(config, data, Path(sites))
    return Deployed(folder, files, site_files, notes)


def _rehearsed(config: Config) -> str:
    """Run `config` by messages and in the simulator; return a line which says that the results are
    equal.

    Raises:
        BadInput: a hook reads data that are not transmitted.
        RunFailed: the results differ.
    """
    with tempfile.TemporaryDirectory() as name:
        cells = differences(simulate(config, Path(name)), rehearse(config, Path(name)))
    if cells:
        raise RunFailed(
            f"the rehearsal's results differ from the simulator's in {len(cells)} table cells "
            f"(first: {cells[0]}): let own code take all random numbers from the run's seed, or "
            f"without own code report a bug; --rehearse false writes the app anyway"
        )
    federation = config.federation
    return (
        f"rehearsal: {federation.rounds} rounds of {federation.clients} clients by messages are "
        f"bit-identical to the simulator's"
    )
