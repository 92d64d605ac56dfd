"""A deployment in one process: sites that get bytes and give bytes, and a comparison with the
simulator, bit by bit."""

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
from fl_lightning.sites.data import Facts, at_site, of_sites, with_loop, write_sites
from fl_lightning.sites.exchange import Exchange, Limits, Reply
from fl_lightning.sites.site import Site

TABLES = ("metrics", "clients", "final")
OF_THE_MACHINE = ("seconds", "memory")
"""Columns that begin so tell of machines, not of what was computed."""
MARK = "rehearsal"
"""Name of the run, and fingerprint."""
LIMITS = 600.0, 600.0, 1.0
"""Seconds of patience in one process."""


@dataclass
class LocalSite:
    """Makes the site of a client anew for each message, as a ClientApp does."""

    fabric: Fabric
    config: Config
    folder: Path
    facts: Facts
    client: int
    file: Path
    fingerprint: str = MARK
    site: Site | None = None
    """That of the last message."""

    def __call__(self, message: bytes) -> bytes:
        """The answer to a message."""
        data = at_site(self.facts, self.config, self.client, self.file)
        self.site = Site(self.fabric, self.config, self.folder, data, self.client, self.fingerprint)
        return self.site.answer(message)


@dataclass
class LocalTransport:
    """Sites in this process."""

    sites: Sequence[Callable[[bytes], bytes]]
    waiting: deque[tuple[str, Reply]] = field(default_factory=deque)

    def addresses(self) -> list[int]:
        """Sites by their place."""
        return list(range(len(self.sites)))

    def push(self, address: int, message: bytes, ttl: float) -> str:
        """Answered at once."""
        name = uuid.uuid4().hex
        self.waiting.append((name, self.sites[address](message)))
        return name

    def pull(self, most: int) -> list[tuple[str, Reply]]:
        """All answers."""
        come = list(self.waiting)
        self.waiting.clear()
        return come

    def pause(self) -> None:
        """There is nothing to wait for."""


def rehearse(
    config: Config, folder: Path, transport: Callable[..., LocalTransport] = LocalTransport
) -> Path:
    """Run `config` in `folder` as a centre and its sites, in this process, on files of the sites'
    own; the run folder.

    Raises:
        BadInput: the method, or something else, cannot be deployed.
    """
    config = with_loop(config)
    data = prepare(config.data, config.federation.clients, config.seed, config.smoke)
    facts = Facts.of(data)
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
    """Run `config` in `folder` as `fl-train fit` does, in the loop; the run folder."""
    out = folder / "simulation"
    out.mkdir()
    launch(with_loop(config), fit_on_rank, out, False)
    return out


def differences(one: Path, other: Path) -> list[str]:
    """Cells of two run folders' tables that are not the same, but for seconds and memory."""
    return [
        f"{table} row {k}, {name}: {a.get(name)} and {b.get(name)}"
        for table, k, a, b, names in unlike(one, other)
        for name in names
    ]


def unlike(one: Path, other: Path) -> Iterator[tuple[str, int, Row, Row, list[str]]]:
    """Rows of two run folders' tables that are not the same, but for seconds and memory: the table,
    the row's number, both rows (empty: there is none), and the columns in which they differ."""
    nothing: Row = {}
    for table in TABLES:
        pairs = zip_longest(
            *(RunFolder(path).read(table) for path in (one, other)), fillvalue=nothing
        )
        for k, (a, b) in enumerate(pairs):
            computed = [name for name in {**a, **b} if not name.startswith(OF_THE_MACHINE)]
            if names := [name for name in computed if repr(a.get(name)) != repr(b.get(name))]:
                yield table, k, a, b, names


def short(config: Config) -> Config:
    """`config` with two rounds, sites' transforms, no other callbacks: enough to see what
    travels."""
    config = repeatable(config, True)
    fewer = replace(config.federation, rounds=min(2, config.federation.rounds))
    return replace(config, federation=fewer, callbacks=of_sites(config), loggers={})


def repeatable(config: Config, value: bool) -> Config:
    """`config` with noise that the seed gives, or (False) that nobody can repeat."""
    noise = config.callbacks.get("localprivacy")
    if noise is None:
        return config
    noise = replace(noise, init_args=noise.init_args | {"reproducible": value})
    return replace(config, callbacks=config.callbacks | {"localprivacy": noise})
