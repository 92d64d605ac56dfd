"""`fl-train plan`: what `fl-train fit` would take, on this machine or on a cluster's."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.cli.parser import fit_parser, keys, plan_parser, typed
from fl_lightning.cli.resolve import complete
from fl_lightning.cli.resolve import plan as resolved
from fl_lightning.cli.settings import Settings, read_flags
from fl_lightning.cli.submit import split
from fl_lightning.config import check
from fl_lightning.errors import BadInput

if TYPE_CHECKING:
    from fl_lightning.config import Config
    from fl_lightning.plan import Hardware, Plan, Rates, Shares, Trace, Way

GIB = 2**30


def plan(argv: list[str]) -> None:
    """Print what a run takes: memory of the busiest rank, bytes between ranks, operations, seconds of a round."""
    parser = plan_parser()
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return
    ours, theirs = split(argv, list(keys(parser)))
    values = typed(parser, Settings.merged(read_flags(ours, keys(parser))).plain)
    layers = read_flags(theirs, keys(fit_parser()))
    config = resolved(layers)
    _check(values, config)
    config = complete(config)
    from fl_lightning import calibration
    from fl_lightning.plan import Planner, shares_of
    from fl_lightning.run import instantiate

    hardware = _hardware(values, config)
    file = Path(values.constants) if values.constants else calibration.constants_file()
    shares = shares_of(config, values.samples)
    rates = calibration.known(file, config, hardware.accelerator, shares)
    planner = Planner(config, shares, rates)
    traces = planner.traces(config)
    if values.measure:
        method = instantiate("method", config.method)
        planner.rates = rates = calibration.measure(file, config, hardware.accelerator, shares, method, traces)
    found = planner.plan(hardware)
    ways = [] if found.fits else planner.ways(hardware)
    if values.json:
        print(json.dumps(_plain(found, hardware, rates, traces, ways, shares), indent=1))
        return
    _show(config, hardware, found, rates, traces, ways, shares)


def _check(values: Any, config: Config) -> None:
    for key in ("nodes", "samples"):
        check(key, getattr(values, key), getattr(values, key) >= 1, "it must be at least 1")
    for key in ("gpus_per_node", "devices"):
        check(key, getattr(values, key), getattr(values, key) >= 0, "it must be 0 or more")
    for key in ("gpu_memory", "node_memory"):
        size = getattr(values, key)
        check(key, size, size is None or 0 < size < math.inf, "it must be a number of GiB above 0")
    both = values.gpus_per_node and values.devices
    check("devices", values.devices, not both, "gpus_per_node says how many processes a node has")


def _hardware(values: Any, config: Config) -> Hardware:
    """What is asked for, and what a rank of it may hold."""
    import torch

    from fl_lightning.plan import Hardware

    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_gpus = values.gpus_per_node > 0 or (
        values.devices == 0 and config.fabric.accelerator in ("cuda", "gpu", "auto") and here > 0
    )
    on_gpus = on_gpus or config.fabric.accelerator in ("cuda", "gpu")
    if on_gpus and values.measure and (values.gpus_per_node or 1) > here:
        asked = values.gpus_per_node or config.fabric.devices
        allowed = f"this machine has {here} CUDA devices: without --measure any number can be planned for"
        raise BadInput("gpus_per_node", asked, allowed)
    nodes = values.nodes if values.nodes > 1 else config.fabric.num_nodes
    devices = values.gpus_per_node or values.devices
    if not devices:
        auto = min(max(here, 1), config.federation.clients) if on_gpus else 1
        devices = auto if config.fabric.devices == "auto" else int(config.fabric.devices)
    ranks, clients = nodes * devices, config.federation.clients
    if ranks > clients:
        key = "gpus_per_node" if values.gpus_per_node else "nodes" if nodes > 1 else "devices"
        value = values.gpus_per_node or (nodes if nodes > 1 else devices)
        raise BadInput(key, value, f"{ranks} processes: at most one for each of the {clients} clients")
    if on_gpus:
        gib = values.gpu_memory or (torch.cuda.get_device_properties(0).total_memory / GIB if here else 80.0)
        return Hardware("cuda", nodes, devices, gib * GIB)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    node = values.node_memory * GIB if values.node_memory else total
    return Hardware("cpu", nodes, devices, node / devices)


def _plain(
    plan: Plan, hardware: Hardware, rates: Rates, traces: list[Trace], ways: list[Way], shares: Shares
) -> dict[str, Any]:
    """For scripts: all in bytes, operations and seconds."""
    return {
        **dataclasses.asdict(plan),
        "fits": plan.fits,
        "round_seconds": plan.round_seconds,
        "hardware": dataclasses.asdict(hardware),
        "rates": dataclasses.asdict(rates),
        "models": [dataclasses.asdict(t) for t in traces],
        "ways": [dataclasses.asdict(way) for way in ways],
        "assumed_data": shares.assumed,
    }


def _show(
    config: Config,
    hardware: Hardware,
    plan: Plan,
    rates: Rates,
    traces: list[Trace],
    ways: list[Way],
    shares: Shares,
) -> None:
    from rich.console import Console
    from rich.table import Table

    from fl_lightning.plan import mib

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file or a pipe has no width to keep to
    models = ", ".join(f"{t.model} ({t.numbers / 1e6:.3g} million numbers)" for t in traces)
    method = config.method.class_path.rpartition(".")[2]
    what = "GPUs" if hardware.accelerator == "cuda" else "processes"
    console.print(
        f"{method}, {models}, {config.federation.clients:,} clients; {hardware.nodes} x {hardware.devices} {what}, "
        f"{config.fabric.precision}",
        highlight=False,
    )
    if shares.assumed:
        print(f"the data are not here: {shares.train[0]:,} training samples a client are assumed (--samples)")
    memory = Table(title="memory of the rank that holds the most", title_justify="left")
    memory.add_column("part")
    memory.add_column("MiB", justify="right")
    memory.add_column("what")
    worst = max((i for i in plan.memory if not i.at_once), key=lambda i: i.bytes)
    for item in plan.memory:
        aside = not item.at_once and item is not worst
        held = f"({item.bytes / 2**20:,.1f})" if aside else f"{item.bytes / 2**20:,.1f}"
        memory.add_row(item.name, held, item.how)
    verdict = "fits in" if plan.fits else "DOES NOT FIT in"
    memory.add_section()
    memory.add_row("peak", f"{plan.total / 2**20:,.1f}", f"{verdict} {mib(plan.capacity)} a rank")
    console.print(memory)
    rounds = Table(title="a round", title_justify="left")
    rounds.add_column("part")
    for column in ("seconds", "GFLOP, all ranks", "MiB between ranks"):
        rounds.add_column(column, justify="right")
    for name, seconds in plan.seconds.items():
        flops = plan.flops.get(name)
        sent = f"{sum(plan.wire.values()) / 2**20:,.2f}" if name == "wire" else ""
        cells = (f"{flops / 1e9:,.2f}" if flops is not None else "", sent)
        rounds.add_row(name, f"{seconds:,.4g}", *cells)
    rounds.add_section()
    total = f"{sum(plan.flops.values()) / 1e9:,.2f}"
    rounds.add_row("all", f"{plan.round_seconds:,.4g}", total, "")
    console.print(rounds)
    print(f"main memory of a node: {mib(plan.host)}")
    for name, size in plan.wire.items():
        print(f"between ranks: {name}: {mib(size)}")
    hours = config.federation.rounds * plan.round_seconds / 3600
    print(f"{config.federation.rounds:,} rounds: {hours:,.2f} h, start-up, tables and checkpoints aside")
    every = {field.name for field in dataclasses.fields(rates)} - {"measured"}
    assumed = sorted(every - set(rates.measured))
    if assumed:
        print(f"seconds rest on assumed constants ({', '.join(assumed)}): measure them here with --measure")
    if not plan.fits:
        print("what would need less:" if ways else "no single option needs less")
        for way in ways:
            print(f"  {way.change}: {mib(way.total)}{', fits' if way.fits else ', not enough alone'}")
