"""A plan in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fl_lightning.foundation.log import in_bytes

if TYPE_CHECKING:
    from fl_lightning.lab.planning.rehearsal import Plan


def lines_of(planned: Plan) -> list[str]:
    """Returns the plan in words."""
    models = ", ".join(planned.models)
    lines = [
        f"{planned.method}, {models}, {planned.clients:,} clients; {planned.accelerator}, "
        f"{planned.precision}"
    ]
    if planned.made_up:
        lines.append(
            f"data: not here; {planned.made_up:,} training samples a client were made up "
            f"(--samples)"
        )
    lines.append(
        f"rehearsed: a round of {planned.rehearsed} of {planned.cohort:,} clients in one process, "
        f"with {planned.trained:.0%} of their local training"
    )
    if planned.memory_device is not None:
        lines.append(
            f"memory of the device: {in_bytes(planned.memory_device)} at the peak of that round"
        )
    lines.append(f"memory of the process: {in_bytes(planned.memory)} at the peak of that round")
    if planned.stored:
        lines.append(
            f"  and {in_bytes(planned.stored)} more for the other clients, until the last round"
        )
    lines.append(
        f"sent by clients in a round: {in_bytes(planned.upload)} up, {in_bytes(planned.download)} "
        f"down"
    )
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
    return [
        f"privacy: epsilon {report['privacy_epsilon']:.4g} at delta {report['privacy_delta']:g} "
        f"for each "
        f"{report['privacy_unit']} at most, after {report[f'privacy_{counted}']} {counted}; noise "
        f"in clips: {noise}"
    ]
