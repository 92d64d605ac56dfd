"""Writes the folder that `flwr run` takes: Flower's ServerApp and ClientApp, the configuration, and
a page with the commands.

Flower sends the folder's .py, .toml, .md, .yaml and .json files to every node, and no others:
`write` checks that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from fl_lightning import __version__
from fl_lightning.configuration.config import check, flat
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.files import write_whole

if TYPE_CHECKING:
    from fl_lightning.configuration.config import Config
    from fl_lightning.sites.data import SiteFacts  # it takes torch, which `--help` does without

FLWR = "1.41.0"
"""The version of Flower that the app is tested with; 1.41 moved all of Flower's interfaces to one
HTTP port."""
PACKAGE = "fl_lightning_app"
NOT_FINGERPRINTED = (
    "federation.rounds",
    "federation.on_bad_client",
    "callbacks",
    "loggers",
    "fabric",
    "data.root",
    "smoke",
)
"""Keys outside the fingerprint: a resumed run may change them, or they describe a machine."""
NOT_SENT = ("lib", "env", "build", "parts", "dist", "venv", "node_modules")
"""Folders whose files Flower does not send."""
MOST = 10 * 2**20
"""Maximum size of an app in bytes: Flower's own limit."""


def write(
    folder: Path, name: str, config: str, facts: SiteFacts, source: Mapping[str, bytes]
) -> list[Path]:
    """Write an app into the new folder `folder`; return the paths of its files.

    Args:
        folder: the app's folder, which is empty or does not exist.
        name: the run's name, at the centre and at the sites.
        config: the resolved configuration, as YAML.
        facts: the facts about the data that all sites need.
        source: files of the user's own code, by path below the folder that imports start from.

    Raises:
        BadInput: Flower would not send one of the files, or the app is too large.
    """
    files = {
        f"{PACKAGE}/__init__.py": b"",
        f"{PACKAGE}/flower.py": _shipped("app_flower.txt").encode(),
        f"{PACKAGE}/config.yaml": config.encode(),
    }
    requirement = (
        f"Flower leaves out test_*.py, *_test.py, folders {', '.join(NOT_SENT)}: rename it"
    )
    for path, content in source.items():
        *parents, file = Path(path).parts
        is_test = file.startswith("test_") or file.endswith("_test.py")
        check(
            "code",
            path,
            not (is_test or set(parents) & set(NOT_SENT)),
            requirement,
        )
        files[f"{PACKAGE}/source/{path}"] = content
    for file, template in (("pyproject.toml", "app_project.toml"), ("README.md", "app_readme.md")):
        text = _shipped(template).format(
            name=name,
            flwr=FLWR,
            package=PACKAGE,
            version=__version__,
        )
        files[file] = text.encode()
    size = sum(map(len, files.values()))
    requirement = f"the app has {size} bytes, Flower takes {MOST}: let the own code import less"
    check("out", str(folder), size <= MOST, requirement)
    for path, content in files.items():
        write_whole(folder / path, content, durable=False)
    facts.write(folder / PACKAGE / "facts.json")
    return [folder / path for path in files]


def _shipped(file: str) -> str:
    return (Path(__file__).parent / file).read_text(encoding="utf-8")


def fingerprint(app: Path, config: Config) -> str:
    """Return the SHA-256 of everything that changes a client's results: the app's configuration
    without the keys `NOT_FINGERPRINTED`, the transforms that sites run, `facts.json`, own code.

    Centre and site compare it, to be sure that both have the same app.

    Raises:
        BadInput: the folder was not written by `fl-train deploy`.
    """
    from fl_lightning.sites.data import site_transforms

    transforms = {name: [c.class_path, c.init_args] for name, c in site_transforms(config).items()}
    try:
        settings = yaml.safe_load((app / "config.yaml").read_text(encoding="utf-8"))
        decisive = {
            key: value
            for key, value in flat(settings)
            if not any(f"{key}.".startswith(f"{free}.") for free in NOT_FINGERPRINTED)
        }
        text = json.dumps([__version__, transforms, decisive], sort_keys=True)
        digest = hashlib.sha256(text.encode() + (app / "facts.json").read_bytes())
        for file in sorted((app / "source").rglob("*.py")):
            digest.update(file.relative_to(app).as_posix().encode() + file.read_bytes())
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        problem = f"this folder is not an app that fl-train deploy wrote: {error}"
        raise BadInput("app", str(app), problem) from None
    return digest.hexdigest()
