"""What must be left of a site after a kill: the state of every round that it has answered, and its
personal model."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import equal

from fl_lightning.cli import main
from fl_lightning.storage import manifest as disk


def lost_rounds(site: Path, rounds: int) -> list[str]:
    """A line where the folder of a site has no intact state after `rounds` rounds; none where it
    has."""
    checkpoints = site / "checkpoints"
    saved = [t for t in disk.rounds(checkpoints) if disk.intact(checkpoints, t) is not None]
    return (
        []
        if max(saved, default=0) >= rounds
        else [f"{site} has the states of rounds {saved}, not of {rounds}"]
    )


def other_model(client: int, site: Path, simulated: Path, folder: Path) -> list[str]:
    """A line where the model in a site's folder is not the one that a simulation's run folder has
    of `client`."""
    models = []
    for name, run in (("simulated", simulated), ("own", site)):
        file = folder / f"{name}-{client}.safetensors"
        assert main(["export", "--run", str(run), "--client", str(client), "--out", str(file)]) == 0
        models.append(load_file(file))
    one, other = models
    same = one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    return [] if same else [f"the model of client {client} is another than the simulator's"]
