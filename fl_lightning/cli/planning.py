"""`fl-train plan`: what `fl-train fit` would take, on this machine or on a cluster's."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

from fl_lightning.cli.resolve import complete
from fl_lightning.cli.resolve import plan as resolved
from fl_lightning.cli.settings import read_line
from fl_lightning.config import check
from fl_lightning.errors import BadInput

if TYPE_CHECKING:
    from fl_lightning.config import Config
    from fl_lightning.planning.plan import Plan, Planner, Way
    from fl_lightning.planning.rehearsal import Timing
    from fl_lightning.planning.setting import Hardware

GIB = 2**30


def plan(argv: list[str]) -> None:
    """Print what a run takes: memory of the busiest rank, bytes between ranks, seconds of a rehearsed round."""
    line = read_line(argv, "plan")
    values, config = line.values, resolved(line.layers)
    allowed = "gpus_per_node says how many processes a node has"
    check("devices", values.devices, not (values.gpus_per_node and values.devices), allowed)
    config = complete(config)
    from fl_lightning.planning.plan import Planner
    from fl_lightning.planning.rehearsal import timed
    from fl_lightning.planning.setting import sizes_of

    hardware = _hardware(values, config)
    planner = Planner(config, sizes_of(config, values.samples))
    estimate = planner.plan(hardware)
    ways = [] if estimate.fits else planner.ways(hardware)
    timing = timed(planner.setup(hardware), estimate, not values.no_run)
    if values.json:
        print(json.dumps(_plain(planner, hardware, estimate, timing, ways), indent=1, default=lambda a: a.tolist()))
        return
    _show(planner, hardware, estimate, timing, ways)


def _hardware(values: Any, config: Config) -> Hardware:
    """What is asked for, and what a rank of it may hold."""
    from fl_lightning import device
    from fl_lightning.planning.setting import Hardware

    here = device.count()
    on_gpus = values.gpus_per_node > 0 or (values.devices == 0 and config.fabric.accelerator == "auto" and here > 0)
    on_gpus = on_gpus or config.fabric.accelerator not in ("auto", "cpu")
    nodes = values.nodes if values.nodes > 1 else config.fabric.num_nodes
    devices = values.gpus_per_node or values.devices
    if not devices:
        auto = min(max(here, 1), config.clients) if on_gpus else 1
        devices = auto if config.fabric.devices == "auto" else int(config.fabric.devices)
    ranks, clients = nodes * devices, config.clients
    if ranks > clients:
        key = "gpus_per_node" if values.gpus_per_node else "nodes" if nodes > 1 else "devices"
        value = values.gpus_per_node or (nodes if nodes > 1 else devices)
        raise BadInput(key, value, f"{ranks} processes: at most one for each of the {clients} clients")
    if on_gpus:
        gib = values.gpu_memory or (device.total_bytes() or 80.0 * GIB) / GIB
        accelerator = config.fabric.accelerator
        kind = (device.here() or "cuda") if accelerator in ("auto", "cpu", "gpu") else accelerator
        return Hardware(kind, nodes, devices, gib * GIB)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    node = values.node_memory * GIB if values.node_memory else total
    return Hardware("cpu", nodes, devices, node / devices)


def _plain(planner: Planner, hardware: Hardware, plan: Plan, timing: Timing, ways: list[Way]) -> dict[str, Any]:
    """For scripts: all in bytes and seconds."""
    return {
        **dataclasses.asdict(plan),
        **dataclasses.asdict(timing),
        "fits": plan.fits,
        "round_seconds": timing.round_seconds,
        "hardware": dataclasses.asdict(hardware),
        "models": [dataclasses.asdict(p) for p in planner.setup(hardware).profiles],
        "ways": [dataclasses.asdict(way) for way in ways],
        "assumed_data": planner.sizes.data is None,
        "privacy": _privacy(planner, hardware),
    }


def _privacy(planner: Planner, hardware: Hardware) -> dict[str, Any]:
    """What the summary of the run will say of its privacy, at most; empty where no callback accounts for it."""
    config, setup = planner.config, planner.setup(hardware)
    sends = any(profile.mask.any() for profile in setup.profiles)
    report: dict[str, Any] = {}
    for component in config.callbacks.values():
        if getattr(component.load(), "accounts", False):
            report |= component.build().planned(config, setup.method, sends, sum(planner.sizes.train))
    return report


def _show(planner: Planner, hardware: Hardware, plan: Plan, timing: Timing, ways: list[Way]) -> None:
    from rich.console import Console
    from rich.table import Table

    from fl_lightning.log import in_bytes

    config, sizes = planner.config, planner.sizes
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=140, highlight=False)  # a file or a pipe has no width to keep to
    profiles = planner.setup(hardware).profiles
    models = ", ".join(f"{p.model} ({p.numbers / 1e6:.3g} million numbers)" for p in profiles)
    method = config.method.class_path.rpartition(".")[2]
    what = f"{hardware.nodes} x {hardware.devices} {'processes' if hardware.accelerator == 'cpu' else 'GPUs'}"
    console.print(f"{method}, {models}, {config.clients:,} clients; {what}, {config.fabric.precision}")
    if sizes.data is None:
        print(f"the data are not here: {sizes.train[0]:,} training samples a client are assumed (--samples)")
    table = Table(title="memory of the rank that holds the most", title_justify="left")
    table.add_column("part")
    table.add_column("MiB", justify="right")
    table.add_column("what")
    worst = max((i for i in plan.memory if not i.at_once), key=lambda i: i.bytes)
    for item in plan.memory:
        mib = f"{item.bytes / 2**20:,.1f}"
        table.add_row(item.name, mib if item.at_once or item is worst else f"({mib})", item.how)
    verdict = "fits in" if plan.fits else "DOES NOT FIT in"
    table.add_section()
    table.add_row("peak", f"{plan.total / 2**20:,.1f}", f"{verdict} {in_bytes(plan.capacity)} a rank")
    console.print(table)
    print(f"main memory of a node: {in_bytes(plan.host)}")
    for name, size in plan.wire.items():
        print(f"between ranks, a round: {name}: {in_bytes(size)}")
    if timing.round_seconds is not None:
        parts = ", ".join(f"{name} {value:,.3g}" for name, value in timing.seconds.items())
        hours = config.federation.rounds * timing.round_seconds / 3600
        print(f"seconds of a round here, in one process: {timing.round_seconds:,.4g} ({parts});", end=" ")
        print(f"{config.federation.rounds:,} rounds: {hours:,.2f} h, start-up, tables and checkpoints aside")
    print(f"seconds: {timing.basis}")
    if privacy := _privacy(planner, hardware):
        noise = ", ".join(f"{k.removeprefix('privacy_noise_')} {v:.4g}" for k, v in privacy.items() if "_noise_" in k)
        print(
            f"privacy: epsilon {privacy['privacy_epsilon']:.4g} at delta {privacy['privacy_delta']:g} for each "
            f"{privacy['privacy_unit']} at most, after {privacy['privacy_uploads']} uploads; noise in clips: {noise}"
        )
    if not plan.fits:
        print("what would need less:" if ways else "no single option needs less")
        for way in ways:
            print(f"  {way.change}: {in_bytes(way.total)}{', fits' if way.fits else ', not enough alone'}")
