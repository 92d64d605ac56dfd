"""Runs a deployment in one process, where messages to sites are function calls, and compares its
tables with the simulator's."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

from lightning.fabric import Fabric

from fl_lightning.callbacks.base import Callback
from fl_lightning.configuration.config import Config
from fl_lightning.data import prepare
from fl_lightning.engine.federation import Federation
from fl_lightning.foundation.csvtable import Row
from fl_lightning.results.folder import RunFolder
from fl_lightning.run import fit_on_rank, launch
from fl_lightning.sites.center import federation_of
from fl_lightning.sites.data import SiteFacts, at_site, site_transforms, with_loop, write_sites
from fl_lightning.sites.exchange import Exchange, Limits, Reply
from fl_lightning.sites.site import Site

TABLES = ("metrics", "clients", "final")
OF_THE_MACHINE = ("seconds", "memory")
"""Columns that begin with these words depend on the machine and are not compared."""
MARK = "rehearsal"
"""The run's name and fingerprint."""
LIMITS = 600.0, 600.0, 1.0
"""`Limits` of a rehearsal."""


@dataclass
class LocalSite:
    """Answers messages to a client; makes a new `Site` for each, as a ClientApp does."""

    fabric: Fabric
    config: Config
    folder: Path
    facts: SiteFacts
    client: int
    file: Path
    fingerprint: str = MARK
    site: Site | None = None
    """The site of the last message."""

    def __call__(self, message: bytes) -> bytes:
        """Return the answer to a message."""
        data = at_site(self.facts, self.config, self.client, self.file)
        self.site = Site(
            self.fabric,
            self.config,
            self.folder,
            data,
            self.client,
            self.fingerprint,
        )
        return self.site.answer(message)


@dataclass
class LocalTransport:
    """Calls sites in this process."""

    sites: Sequence[Callable[[bytes], bytes]]
    waiting: deque[tuple[str, Reply]] = field(default_factory=deque)

    def addresses(self) -> list[int]:
        """Return the indices of all sites."""
        return list(range(len(self.sites)))

    def push(self, address: int, message: bytes, ttl: float) -> str:
        """Call the site and keep its answer; return a name for the message."""
        name = uuid.uuid4().hex
        self.waiting.append((name, self.sites[address](message)))
        return name

    def pull(self, most: int) -> list[tuple[str, Reply]]:
        """Return the answers that were kept, and forget them."""
        arrived = list(self.waiting)
        self.waiting.clear()
        return arrived

    def pause(self) -> None:
        """Do nothing: `push` has waited for the answer."""


def rehearse(
    config: Config, folder: Path, transport: Callable[..., LocalTransport] = LocalTransport
) -> Path:
    """Run `config` in this process by messages between a centre and sites, each with its own data
    file; return the centre's run folder.

    Args:
        config: the resolved configuration.
        folder: an empty folder for the data files and the folders of centre and sites.
        transport: makes a transport from the sites.

    Raises:
        BadInput: the method or a setting cannot be deployed.
    """
    config = with_loop(config)
    data = prepare(
        config.data,
        config.federation.clients,
        config.seed,
        config.smoke,
    )
    facts = SiteFacts.of(data)
    files = write_sites(config, data, folder / "data")
    center = folder / "center"
    center.mkdir()
    public = files[0].with_stem("public") if facts.public else None

    def put_together(
        fabric: Fabric, config: Config, out: Path, callbacks: Sequence[Callback]
    ) -> Federation:
        sites = []
        for client, file in enumerate(files):
            state = folder / f"site-{client}"
            state.mkdir()
            sites.append(LocalSite(fabric, config, state, facts, client, file))
        exchange = Exchange(transport(sites), MARK, MARK, Limits(*LIMITS))
        return federation_of(exchange, facts, public, fabric, config, out, callbacks)

    launch(config, partial(fit_on_rank, put_together=put_together), center, False)
    return center


def simulate(config: Config, folder: Path) -> Path:
    """Run `config` in `folder` like `fl-train fit`, with the executor `loop`; return the run
    folder."""
    out = folder / "simulation"
    out.mkdir()
    launch(with_loop(config), fit_on_rank, out, False)
    return out


def differences(run: Path, other_run: Path) -> list[str]:
    """Return a text for each cell in which two run folders' tables differ; columns of seconds and
    memory are not compared."""
    return [
        f"{table} row {k}, {name}: {a.get(name)} and {b.get(name)}"
        for table, k, a, b, names in unlike(run, other_run)
        for name in names
    ]


def unlike(run: Path, other_run: Path) -> Iterator[tuple[str, int, Row, Row, list[str]]]:
    """Yield each row in which the tables of two run folders differ. Columns of seconds and memory
    are not compared.

    Yields:
        The table's name, the row's number from 0, the row in `run`, the row in `other_run`, and the
        names of the unequal columns. A row that a table does not have is an empty dict.
    """
    nothing: Row = {}
    for table in TABLES:
        rows = RunFolder(run).read(table)
        other_rows = RunFolder(other_run).read(table)
        for k, (a, b) in enumerate(zip_longest(rows, other_rows, fillvalue=nothing)):
            unequal = [name for name in a | b if repr(a.get(name)) != repr(b.get(name))]
            names = [name for name in unequal if not name.startswith(OF_THE_MACHINE)]
            if names:
                yield table, k, a, b, names


def two_rounds_of(config: Config) -> Config:
    """Return `config` with at most two rounds and no callbacks but those that sites run: in these
    rounds every kind of message is sent."""
    config = with_noise(config, reproducible=True)
    federation = replace(config.federation, rounds=min(2, config.federation.rounds))
    return replace(
        config,
        federation=federation,
        callbacks=site_transforms(config),
        loggers={},
    )


def with_noise(config: Config, *, reproducible: bool) -> Config:
    """Return `config` with the noise of `localprivacy` drawn from the seed (`reproducible`) or from
    the operating system's random numbers."""
    noise = config.callbacks.get("localprivacy")
    if noise is None:
        return config
    noise = replace(noise, init_args=noise.init_args | {"reproducible": reproducible})
    return replace(config, callbacks=config.callbacks | {"localprivacy": noise})
