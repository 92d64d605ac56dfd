"""`fl-train deploy`."""

from __future__ import annotations

from pathlib import Path

from fl_lightning.cli.resolve import complete, plan, to_yaml
from fl_lightning.cli.settings import read_line


def deploy(argv: list[str]) -> None:
    """Write the app's folder and, with `--sites`, the data of rehearsal sites."""
    line = read_line(argv, "deploy")
    values = line.values
    config = complete(plan(line.layers))
    from fl_lightning.sites.deploy import deploy as write_app

    written = write_app(
        config, values.out, to_yaml=to_yaml, sites=values.sites, rehearse=values.rehearse
    )
    for note in written.notes:
        print(note)
    readme = Path(values.out) / "README.md"
    print(f"app: {values.out} ({len(written.app)} files); the commands: {readme}")
    if written.sites:
        first, last = written.sites[0], written.sites[-1].name
        print(f"data of {len(written.sites)} sites to rehearse with: {first} to {last}")
