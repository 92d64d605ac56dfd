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
    from fl_lightning.planning.memory import Part
    from fl_lightning.planning.plan import Plan, Planner, Way
    from fl_lightning.planning.rehearsal import Timing
    from fl_lightning.planning.setting import Hardware

GIB = 2**30


def plan(argv: list[str]) -> None:
    """Print what a run takes: memory of the busiest rank, bytes between ranks, seconds of a rehearsed round."""
    line = read_line(argv, "plan")
    values = line.values
    if values.together is not None:
        return _together(line, values)
    check("together", None, not line.words, "a study is planned for a number of runs that train together")
    config = resolved(line.layers)
    allowed = "gpus_per_node says how many processes a node has"
    check("devices", values.devices, not (values.gpus_per_node and values.devices), allowed)
    config = complete(config)
    from fl_lightning.planning.plan import Planner
    from fl_lightning.planning.rehearsal import timed
    from fl_lightning.planning.setting import sizes_of
    from fl_lightning.planning.start import check_start

    hardware = _hardware(values, config)
    planner = Planner(config, sizes_of(config, values.samples))
    check_start(config, planner.sizes.data)
    estimate = planner.plan(hardware)
    ways = [] if estimate.fits else planner.ways(hardware)
    timing = timed(planner.setup(hardware), estimate, not values.no_run)
    if values.json:
        print(json.dumps(_plain(planner, hardware, estimate, timing, ways), indent=1, default=lambda a: a.tolist()))
        return
    _show(planner, hardware, estimate, timing, ways)


def _together(line: Any, values: Any) -> None:
    """Print what so many runs of the config, or of the study that is named, take in one process."""
    import torch

    from fl_lightning import device
    from fl_lightning.cli import studyfile
    from fl_lightning.cli.study import resolve
    from fl_lightning.cli.together import heaviest
    from fl_lightning.log import in_bytes
    from fl_lightning.planning.memory import peak
    from fl_lightning.study.grid import Study

    check("plan", " ".join(line.words) or None, len(line.words) < 2, "one study at most")
    if line.words:
        _, _, configs = resolve(Study.of(studyfile.read(line.words[0])), over=line.layers)
    else:
        configs = [complete(resolved(line.layers))]
    stacked = [c if c.fabric.executor != "loop" else _stacked(c) for c in configs]
    setup, parts = heaviest(stacked, values.together, values.samples)
    if values.json:
        items = [dataclasses.asdict(part) for part in parts]
        print(json.dumps({"runs": values.together, "memory": items, "total": peak(parts)}, indent=1))
        return
    method = setup.config.method.class_path.rpartition(".")[2]
    models = ", ".join(f"{p.model} ({p.numbers / 1e6:.3g} million numbers)" for p in setup.profiles)
    print(f"{values.together:,} runs together in a process: {method}, {models}, {setup.config.clients:,} clients")
    verdict = f"{in_bytes(device.free_bytes(torch.device('cpu')))} are free on this machine"
    _console().print(_table("memory of a process of a study", parts, peak(parts), verdict))


def _stacked(config: Config) -> Config:
    return dataclasses.replace(config, fabric=dataclasses.replace(config.fabric, executor="vmap"))


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
            report |= component.build().planned(config, setup.method, sends, planner.sizes.train)
    return report


def _console() -> Any:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=140, highlight=False)  # a pipe has no width to keep to


def _table(title: str, parts: list[Part], peak: float, verdict: str) -> Any:
    """Parts in MiB; of those that do not lie there all the time, all but the greatest in brackets."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("part")
    table.add_column("MiB", justify="right")
    table.add_column("what")
    worst = max((i for i in parts if not i.at_once), key=lambda i: i.bytes)
    for item in parts:
        mib = f"{item.bytes / 2**20:,.1f}"
        table.add_row(item.name, mib if item.at_once or item is worst else f"({mib})", item.how)
    table.add_section()
    table.add_row("peak", f"{peak / 2**20:,.1f}", verdict)
    return table


def _show(planner: Planner, hardware: Hardware, plan: Plan, timing: Timing, ways: list[Way]) -> None:
    from fl_lightning.log import in_bytes

    config, sizes = planner.config, planner.sizes
    console = _console()
    profiles = planner.setup(hardware).profiles
    models = ", ".join(f"{p.model} ({p.numbers / 1e6:.3g} million numbers)" for p in profiles)
    method = config.method.class_path.rpartition(".")[2]
    what = f"{hardware.nodes} x {hardware.devices} {'processes' if hardware.accelerator == 'cpu' else 'GPUs'}"
    console.print(f"{method}, {models}, {config.clients:,} clients; {what}, {config.fabric.precision}")
    if sizes.data is None:
        print(f"the data are not here: {sizes.train[0]:,} training samples a client are assumed (--samples)")
    verdict = f"{'fits in' if plan.fits else 'DOES NOT FIT in'} {in_bytes(plan.capacity)} a rank"
    console.print(_table("memory of the rank that holds the most", plan.memory, plan.total, verdict))
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
        times = next(
            f"{privacy[f'privacy_{what}']} {what}" for what in ("uploads", "steps") if f"privacy_{what}" in privacy
        )
        print(
            f"privacy: epsilon {privacy['privacy_epsilon']:.4g} at delta {privacy['privacy_delta']:g} for each "
            f"{privacy['privacy_unit']} at most, after {times}; noise in clips: {noise}"
        )
    if not plan.fits:
        print("what would need less:" if ways else "no single option needs less")
        for way in ways:
            print(f"  {way.change}: {in_bytes(way.total)}{', fits' if way.fits else ', not enough alone'}")
