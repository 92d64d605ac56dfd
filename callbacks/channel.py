"""Simulated duration of a round, from bytes and operations, when clients communicate over a link.

Each client of the cohort receives, computes, then sends; the round is over when the slowest has
sent. Training is not changed, and no clock is read: equal runs have equal times, on any number of
processes.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np

from fl_lightning.callbacks.base import Observer
from fl_lightning.configuration.config import check
from fl_lightning.configuration.ranges import NonNegativeFloat, PositiveFloat, Range
from fl_lightning.core import RoundRecord, RunContext
from fl_lightning.foundation.csvtable import Row
from fl_lightning.foundation.rng import numpy_rng
from fl_lightning.results.folder import CLIENT_FLOPS, RunFolder

Decibel = Annotated[float, Range(-500, 500)]
PARTS = ("channel_download_s", "channel_compute_s", "channel_upload_s")


@dataclass
class _Channel(Observer):
    """Base of the channels: computes the seconds of each client and round from `rates`. The
    server's own computing time is not counted."""

    client_gflops: PositiveFloat | None = field(default=73.0, kw_only=True)
    latency_ms: NonNegativeFloat = field(default=0.0, kw_only=True)

    def rates(
        self,
        run: RunContext,
        round: int,
        clients: list[int],
        sizes: np.ndarray,
    ) -> np.ndarray:
        """Return the rates of each client's download and upload in bits per second: (k, 2) for k
        clients.

        Args:
            run: the run in progress.
            round: number of the round.
            clients: the k clients.
            sizes: bytes of their downloads and uploads, (k, 2).
        """
        raise NotImplementedError

    def _computing(self, row: Row) -> float:
        """Return the seconds that the client of `row` computes; NaN if its operations could not be
        counted."""
        if not self.client_gflops:
            return 0.0
        return sum(row.get(name, math.nan) for name in CLIENT_FLOPS) / (self.client_gflops * 1e9)

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` if there are two channels."""
        channels = [type(c).__name__.lower() for c in run.callbacks if isinstance(c, _Channel)]
        check(
            "callbacks",
            ", ".join(channels),
            len(channels) == 1,
            "a round has one length; keep one channel",
        )

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """Add each client's seconds to its row, and those of the slowest to the round's metrics."""
        rows = record.clients
        clients = [int(row["client"]) for row in rows]
        sizes = np.array([[row["download_bytes"], row["upload_bytes"]] for row in rows], float)
        rates = self.rates(run, record.round, clients, sizes)
        travel = np.where(sizes > 0, 8 * sizes / rates + self.latency_ms / 1e3, 0.0)
        for row, (download, upload) in zip(rows, travel.tolist(), strict=True):
            row["channel_download_s"] = download
            row["channel_compute_s"] = self._computing(row)
            row["channel_upload_s"] = upload
        if any(math.isnan(row[part]) for row in rows for part in PARTS):
            for row in rows:
                del row["channel_compute_s"]  # the slowest client is unknown, too
            return
        slowest = max(rows, key=lambda row: sum(row[part] for part in PARTS))
        parts = {part: slowest[part] for part in PARTS}
        record.metrics |= {"channel_s": sum(parts.values()), **parts}

    def summarize(self, run: RunContext) -> dict[str, float]:
        """Return the seconds of all rounds over the channel, including those before a resume;
        nothing if a round's are unknown."""
        rows = RunFolder(run.folder).read("metrics") if run.is_main else []
        complete = rows and all("channel_s" in row for row in rows)
        return {"total_channel_s": math.fsum(row["channel_s"] for row in rows)} if complete else {}


@dataclass
class FixedRate(_Channel):
    """Computes the seconds of each round over links of fixed rates, the same for every client.

    Args:
        upload_mbit: rate of each client's upload in megabits per second. 18.56: 42.654 MiB in 19.28
            s (BLS journal, Table 5).
        download_mbit: rate of each client's download in megabits per second. 49.97: 42.654 MiB in
            7.16 s (BLS journal, Table 5).
        client_gflops: computing speed of a client, in 1e9 operations per second; null: computing
            takes no time. 73.0: 424.13 GFLOPs in 5.81 s (BLS journal, FedAvg in Tables 6 and 5, if
            both mean the same work).
        latency_ms: milliseconds that are added to each transfer that happens. 0: the journal has
            none.
    """

    upload_mbit: PositiveFloat = 18.56
    download_mbit: PositiveFloat = 49.97

    def rates(
        self,
        run: RunContext,
        round: int,
        clients: list[int],
        sizes: np.ndarray,
    ) -> np.ndarray:
        """Return the configured download and upload rates in bits per second, equal for all k
        clients: shape (k, 2)."""
        return np.broadcast_to(np.array([self.download_mbit, self.upload_mbit]) * 1e6, sizes.shape)


@dataclass
class Wireless(_Channel):
    """Computes the seconds of each round in a radio cell: Shannon rates by distance, bands shared
    among the round's clients.

    After the system study of KAPC+BLS (Zhi et al., IEEE TMC 2025): 3GPP's macro cell (TR 36.814,
    case 1) without walls and shadowing; the two values marked "fitted" are chosen so that FedAvg's
    times of the journal's Table 5 come out (docs/decisions/0011). The upload band is shared by the
    clients that upload anything in the round, the download band by those that receive anything; the
    shares stay the same for the whole round.

    Args:
        upload_mhz: band that the round's uploads share. 28.6: fitted (19.28 s for 42.654 MiB,
            slowest of 10).
        download_mhz: band that the round's downloads share equally; they share the server's power
            in the same way. 50: journal.
        shares: division of the upload band: equal, or in proportion to each client's bytes. equal:
            our choice; the journal speaks of shares but does not give the rule.
        client_dbm: power of a client. 23: 3GPP.
        server_dbm: power of the server's station over its whole band. 46: 3GPP.
        path_loss_db: loss at 1 km. 128.1: 3GPP.
        path_loss_slope: further loss for ten times the distance, in dB. 37.6: 3GPP.
        noise_dbm_hz: thermal noise density. -174: physics, at 290 K.
        interference_db: increase of the noise by interference and receivers, both ways. 5.9: fitted
            (7.16 s download).
        near: least distance of a client from the server, in metres. 35: 3GPP.
        far: greatest distance, in metres. 289: 3GPP, radius of a cell with stations 500 m apart.
        fading: Rayleigh fading, drawn anew for each client, round and direction. false: the values
            were fitted without it.
        client_gflops: computing speed of a client, in 1e9 operations per second; null: computing
            takes no time. 73.0: 424.13 GFLOPs in 5.81 s (journal, FedAvg in Tables 6 and 5, if both
            mean the same work).
        latency_ms: milliseconds that are added to each transfer that happens. 0: the journal has
            none.
    """

    upload_mhz: PositiveFloat = 28.6
    download_mhz: PositiveFloat = 50.0
    shares: Literal["equal", "bytes"] = "equal"
    client_dbm: Decibel = 23.0
    server_dbm: Decibel = 46.0
    path_loss_db: Decibel = 128.1
    path_loss_slope: NonNegativeFloat = 37.6
    noise_dbm_hz: Decibel = -174.0
    interference_db: NonNegativeFloat = 5.9
    near: PositiveFloat = 35.0
    far: PositiveFloat = 289.0
    fading: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        requirement = f"it must be at least near = {self.near:g}"
        check(f"{self.config_key}.far", self.far, self.far >= self.near, requirement)

    def distance(
        self,
        seed: int,
        client: int,
    ) -> float:
        """Return the client's distance to the server in metres: drawn evenly over the ring's area,
        the same in every round."""
        inner = self.near**2
        share = numpy_rng(seed, "channel distance", client).random()
        return math.sqrt(inner + (self.far**2 - inner) * share)

    def gains(self, seed: int, round: int, client: int) -> np.ndarray:
        """Return the channel gains (received power / sent power) of a client's download and upload
        in a round, (2,)."""
        decades = math.log10(self.distance(seed, client) / 1e3)
        gain = _ratio(-self.path_loss_db - self.path_loss_slope * decades)
        if not self.fading:
            return np.full(2, gain)
        # the power of a Rayleigh amplitude, 1 on average
        return gain * numpy_rng(seed, "channel fading", client, round).exponential(size=2)

    def rates(
        self,
        run: RunContext,
        round: int,
        clients: list[int],
        sizes: np.ndarray,
    ) -> np.ndarray:
        """Return the capacity of each client's share of the bands for download and upload, in bits
        per second: (k, 2) for k clients.

        Args:
            run: gives the seed.
            round: number of the round, by which fading is drawn.
            clients: the k clients.
            sizes: bytes of their downloads and uploads, (k, 2).
        """
        gain = np.array([self.gains(run.config.seed, round, client) for client in clients])
        weights = (sizes > 0).astype(float)
        if self.shares == "bytes":
            weights[:, 1] = sizes[:, 1]
        # 1 for an unused band, since rates are divided by it
        share = np.where(sizes > 0, weights / np.maximum(weights.sum(axis=0), 1.0), 1.0)
        band = share * np.array([self.download_mhz, self.upload_mhz]) * 1e6
        power = 1e-3 * np.array([_ratio(self.server_dbm), _ratio(self.client_dbm)])  # watts
        power = power * np.stack([share[:, 0], np.ones(len(clients))], axis=1)
        noise = 1e-3 * _ratio(self.noise_dbm_hz + self.interference_db)
        return rate(band, power * gain, noise)


def rate(
    band: np.ndarray,
    received: np.ndarray,
    noise: float | np.ndarray,
) -> np.ndarray:
    """Return Shannon's capacity in bits per second.

    Args:
        band: hertz.
        received: power of the signal in watts.
        noise: density of noise and interference in watts per hertz.
    """
    return band * np.log1p(received / (noise * band)) / math.log(2)


def _ratio(decibel: float) -> float:
    return float(10 ** (decibel / 10))
