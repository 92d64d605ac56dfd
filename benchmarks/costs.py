"""What a round of every method costs: the bytes and operations that a run's own record counts, on the digits.

    python benchmarks/costs.py [METHOD ...]     prints the table in docs/methods.md

The setting is kapc_exact_digits for all (ten clients, an MLP of 6,570 numbers, five epochs), with a fifth of the data
for validation and 144 public images. It is the second round that counts: in the first much is not known yet.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from workloads import launched

from fl_lightning import catalogue
from fl_lightning.cli.resolve import complete, plan
from fl_lightning.cli.settings import read_line
from fl_lightning.run import assemble

SETTING = (
    "--config kapc_exact_digits --loggers null --callbacks null --data.validation 0.2 --data.public held_back "
    "--fabric.accelerator cpu --fabric.executor loop"
)
DISTIL = "--method.samples 128 --method.batch_size 32"
ARGUMENTS = (
    dict.fromkeys(("fedmd", "simpfd", "topkpfd", "ktpfl"), DISTIL)
    | dict.fromkeys(("feddf", "pfeddf"), "--method.steps 200 --method.batch_size 32")
    | dict.fromkeys(("fedsalora", "ffalora"), "--model.adapters.rank 8")
)
"""What a method asks for beyond its defaults: there are 144 public images, and adapters of LoRA's rank on the MLP."""
HEAD = ["method", "up, kB", "down, kB", "training, MFLOP", "beside it, MFLOP", "server, MFLOP"]


def row(name: str) -> str:
    """Of a method's second round: bytes and operations of a client on average, and operations of the server."""
    flags = f"{SETTING} --method {name} {ARGUMENTS.get(name, '')}".split()
    config = complete(plan(read_line(flags).layers))
    fabric = launched(precision=config.fabric.precision)
    with tempfile.TemporaryDirectory() as folder:
        fed = assemble(fabric, config, Path(folder), [])
        fed.prepare()
        metrics = [fed.round(t).metrics for t in (1, 2)][-1]
    clients = config.federation.clients
    passes = metrics["flops_forward"] + metrics["flops_backward"] + metrics["flops_penalty"]
    cells = [f"{metrics[name] / clients / 1e3:.1f}" for name in ("upload_bytes", "download_bytes")]
    operations = (passes / clients, metrics["flops_extra"] / clients, metrics["flops_server"])
    cells += [f"{value / 1e6:.3g}" for value in operations]
    return f"| `{name}` | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
    for entries in catalogue.families("methods").values():
        for entry in entries:
            if not sys.argv[1:] or entry.name in sys.argv[1:]:
                print(row(entry.name), flush=True)


if __name__ == "__main__":
    main()
