"""What a rehearsed round took, and the run that follows from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from fl_lightning.foundation.log import in_bytes


@dataclass(frozen=True)
class Plan:
    """A rehearsed round in one process of this machine, and the run that follows from it."""

    method: str
    models: list[str]
    """Names and lengths of their vectors."""
    accelerator: str
    precision: str
    clients: int
    """Clients of the run."""
    cohort: int
    """Clients of a round."""
    rounds: int
    rehearsed: int
    """Clients of the rehearsed round."""
    trained: float
    """The rehearsed share of their local training, 0 to 1."""
    made_up: int
    """Training samples a client that were made up and trained on; 0: the data are here."""
    memory: float
    """Peak of the rehearsing process, bytes of main memory."""
    memory_device: float | None
    """Peak of torch on the accelerator, bytes; None on a CPU."""
    stored: float
    """Bytes that further clients add until the last round: their vectors, and their samples where
    these are kept."""
    upload: float
    """Bytes of a round from clients to server, the cohort's."""
    download: float
    seconds: dict[str, float]
    """Of a round: `clients`, `evaluation`, `server`."""
    privacy: dict[str, Any]
    """What the summary of the run will say of its privacy, at most."""

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def as_json(self) -> str:
        """Returns its figures as JSON."""
        return json.dumps(asdict(self) | {"round_seconds": self.round_seconds}, indent=1)

    @property
    def round_seconds(self) -> float:
        """Seconds of a whole round."""
        return sum(self.seconds.values())


def _lines(planned: Plan) -> list[str]:
    """Returns the plan in words."""
    models = ", ".join(planned.models)
    runs_on = f"{planned.accelerator}, {planned.precision}"
    lines = [f"{planned.method}, {models}, {planned.clients:,} clients; {runs_on}"]
    if planned.made_up:
        samples = f"{planned.made_up:,} training samples a client were made up (--samples)"
        lines.append(f"data: not here; {samples}")
    cohort = f"a round of {planned.rehearsed} of {planned.cohort:,} clients in one process"
    lines.append(f"rehearsed: {cohort}, with {planned.trained:.0%} of their local training")
    peak = "at the peak of that round"
    if planned.memory_device is not None:
        lines.append(f"memory of the device: {in_bytes(planned.memory_device)} {peak}")
    lines.append(f"memory of the process: {in_bytes(planned.memory)} {peak}")
    if planned.stored:
        until = "more for the other clients, until the last round"
        lines.append(f"  and {in_bytes(planned.stored)} {until}")
    up, down = in_bytes(planned.upload), in_bytes(planned.download)
    lines.append(f"sent by clients in a round: {up} up, {down} down")
    parts = ", ".join(f"{name} {value:,.3g}" for name, value in planned.seconds.items())
    hours = planned.rounds * planned.round_seconds / 3600
    lines.append(
        f"seconds of a whole round in one process: {planned.round_seconds:,.4g} ({parts}); "
        f"{planned.rounds:,} rounds: {hours:,.2f} h, without start-up, tables and checkpoints"
    )
    return lines + _of_privacy(planned.privacy)


def _of_privacy(report: dict[str, Any]) -> list[str]:
    if not report:
        return []
    noises = {k.removeprefix("privacy_noise_"): v for k, v in report.items() if "_noise_" in k}
    noise = ", ".join(f"{name} {value:.4g}" for name, value in noises.items())
    counted = next(unit for unit in ("uploads", "steps") if f"privacy_{unit}" in report)
    spent = f"epsilon {report['privacy_epsilon']:.4g} at delta {report['privacy_delta']:g}"
    after = f"at most, after {report[f'privacy_{counted}']} {counted}"
    whose = f"for each {report['privacy_unit']} {after}"
    return [f"privacy: {spent} {whose}; noise in clips: {noise}"]
