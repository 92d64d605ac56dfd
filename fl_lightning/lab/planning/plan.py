"""The measurements of a rehearsed round, and what they imply for the whole run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from fl_lightning.foundation.log import in_bytes


@dataclass(frozen=True)
class Plan:
    """The measurements of a round that was rehearsed in one process here, scaled to the whole
    run."""

    method: str
    models: list[str]
    """Name and vector length of each architecture."""
    accelerator: str
    precision: str
    clients: int
    """Clients of the run."""
    cohort: int
    """Clients of one round, mean over rounds."""
    rounds: int
    rehearsed: int
    """Clients that took part in the rehearsed round."""
    trained: float
    """Share of the rehearsed clients' local training that was carried out, from 0 to 1."""
    made_up: int
    """Training samples of each client if the data were made up, else 0."""
    memory: float
    """Peak main memory of the rehearsing process, in bytes."""
    memory_device: float | None
    """Peak memory that torch took on the accelerator, in bytes; None on a CPU."""
    stored: float
    """Bytes by which main memory grows until the last round, as further clients take part: their
    vectors, and their samples if these are kept in memory."""
    upload: float
    """Bytes that the cohort sends to the server in a round."""
    download: float
    """Bytes that the server sends to the cohort in a round."""
    seconds: dict[str, float]
    """Seconds of a whole round, by part: `clients`, `evaluation`, `server`."""
    privacy: dict[str, Any]
    """The `privacy_...` values that the run's summary will have at most; empty without a privacy
    callback."""

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def as_json(self) -> str:
        """Returns the plan as JSON, with the seconds of a round."""
        return json.dumps(asdict(self) | {"round_seconds": self.round_seconds}, indent=1)

    @property
    def round_seconds(self) -> float:
        """Seconds of a whole round, its parts added up."""
        return sum(self.seconds.values())


def _lines(plan: Plan) -> list[str]:
    """Returns the lines that `fl-train plan` prints."""
    models = ", ".join(plan.models)
    lines = [
        f"{plan.method}, {models}, {plan.clients:,} clients; {plan.accelerator}, {plan.precision}"
    ]
    if plan.made_up:
        lines.append(
            f"data: not here; {plan.made_up:,} training samples a client were made up (--samples)"
        )
    lines.append(
        f"rehearsed: a round of {plan.rehearsed} of {plan.cohort:,} clients in one process, with "
        f"{plan.trained:.0%} of their local training"
    )
    peak = "at the peak of that round"
    if plan.memory_device is not None:
        lines.append(f"memory of the device: {in_bytes(plan.memory_device)} {peak}")
    lines.append(f"memory of the process: {in_bytes(plan.memory)} {peak}")
    if plan.stored:
        lines.append(
            f"  and {in_bytes(plan.stored)} more for the other clients, until the last round"
        )
    up, down = in_bytes(plan.upload), in_bytes(plan.download)
    lines.append(f"sent by clients in a round: {up} up, {down} down")
    parts = ", ".join(f"{name} {value:,.3g}" for name, value in plan.seconds.items())
    hours = plan.rounds * plan.round_seconds / 3600
    lines.append(
        f"seconds of a whole round in one process: {plan.round_seconds:,.4g} ({parts}); "
        f"{plan.rounds:,} rounds: {hours:,.2f} h, without start-up, tables and checkpoints"
    )
    return lines + _privacy_lines(plan.privacy)


def _privacy_lines(report: dict[str, Any]) -> list[str]:
    """Returns the line on privacy; no line without a privacy callback."""
    if not report:
        return []
    noises = {k.removeprefix("privacy_noise_"): v for k, v in report.items() if "_noise_" in k}
    noise = ", ".join(f"{name} {value:.4g}" for name, value in noises.items())
    counted = next(unit for unit in ("uploads", "steps") if f"privacy_{unit}" in report)
    return [
        f"privacy: epsilon {report['privacy_epsilon']:.4g} at delta {report['privacy_delta']:g} "
        f"for each {report['privacy_unit']} at most, after {report[f'privacy_{counted}']} "
        f"{counted}; noise, in multiples of the clip: {noise}"
    ]
