"""The folder that `flwr run` takes: Flower's two ends, the configuration, and a page with the commands.

Flower sends the folder's .py, .toml, .md, .yaml and .json files to every node, and no others: `write` checks that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fl_lightning import __version__
from fl_lightning.config import check
from fl_lightning.errors import BadInput
from fl_lightning.files import write_whole

if TYPE_CHECKING:
    from fl_lightning.config import Config
    from fl_lightning.deploy.data import Facts  # it takes torch, which `--help` does without

FLWR = "1.41.0"
"""The version of Flower that the app is tested with; 1.41 moved all of Flower's interfaces to one HTTP port."""
PACKAGE = "fl_lightning_app"
FREE = ("federation.rounds", "federation.on_bad_client", "callbacks", "loggers", "fabric", "data.root", "smoke")
"""What a run may change when it goes on, and what is a machine's own: it is not in the fingerprint."""
LEFT_OUT = ("lib", "env", "build", "parts", "dist", "venv", "node_modules")
"""Folders whose files Flower does not send."""
MOST = 10 * 2**20
"""Bytes of an app at most: Flower's own limit."""


def write(folder: Path, name: str, config: str, facts: Facts, source: Mapping[str, bytes]) -> list[Path]:
    """Write an app called `name` into `folder`; the files.

    Args:
        folder: a new one.
        name: of the run, at the centre and at the sites.
        config: the resolved configuration, as YAML.
        facts: of the data.
        source: own code, by its path below the import folder.

    Raises:
        BadInput: Flower would not send one of the files.
    """
    here = Path(__file__).parent
    ends = {file: (here / file).read_text(encoding="utf-8") for file in ("flower.py", "relay.py")}
    inside = {file: text.replace("fl_lightning.deploy.relay", f"{PACKAGE}.relay") for file, text in ends.items()}
    inside |= {"__init__.py": '"""A federation of fl_lightning as a Flower app."""\n', "config.yaml": config}
    files = {f"{PACKAGE}/{file}": text.encode() for file, text in inside.items()}
    files |= {f"{PACKAGE}/source/{path}": text for path, text in source.items()}
    for path in source:
        *parents, file = Path(path).parts
        lost = file.startswith("test_") or file.endswith("_test.py") or set(parents) & set(LEFT_OUT)
        check("code", path, not lost, f"Flower leaves out test_*.py, *_test.py and the folders {', '.join(LEFT_OUT)}")
    files |= {"pyproject.toml": _PROJECT.format(name=name, flwr=FLWR, package=PACKAGE).encode()}
    files |= {"README.md": _PAGE.format(name=name, flwr=FLWR, version=__version__).encode()}
    size = sum(map(len, files.values()))
    check("out", str(folder), size <= MOST, f"the app has {size} bytes, and Flower takes {MOST}")
    for path, content in files.items():
        write_whole(folder / path, content, durable=False)
    facts.write(folder / PACKAGE / "facts.json")
    return [folder / path for path in files]


def fingerprint(app: Path, config: Config) -> str:
    """SHA-256 of what decides a client's work: the `config` of `app` but for what is FREE, transforms that sites run,
    the facts, own code.

    Raises:
        BadInput: the folder is no app of ours.
    """
    from fl_lightning.deploy.data import of_sites

    digest = hashlib.sha256(__version__.encode())
    transforms = {name: [c.class_path, c.init_args] for name, c in of_sites(config).items()}
    digest.update(json.dumps(transforms, sort_keys=True).encode() if transforms else b"")
    try:
        settings = yaml.safe_load((app / "config.yaml").read_text(encoding="utf-8"))
        digest.update(json.dumps(_kept(settings), sort_keys=True).encode())
        digest.update((app / "facts.json").read_bytes())
        for file in sorted((app / "source").rglob("*.py")):
            digest.update(file.relative_to(app).as_posix().encode() + file.read_bytes())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadInput("app", str(app), f"it is no app that fl-train deploy wrote: {error}") from None
    return digest.hexdigest()


def _kept(settings: Any, path: str = "") -> Any:
    if not isinstance(settings, dict):
        return settings
    names = {name: f"{path}.{name}".strip(".") for name in settings}
    return {name: _kept(settings[name], key) for name, key in names.items() if key not in FREE}


_PROJECT = """[project]
name = "{name}"
version = "1.0.0"
description = "A federation of fl_lightning as a Flower app"
dependencies = ["flwr=={flwr}"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "fl-lightning"

[tool.flwr.app.components]
serverapp = "{package}.flower:server"
clientapp = "{package}.flower:client"

# `flwr run APP -c 'key=value'` changes these for one run.
[tool.flwr.app.config]
out = "runs"       # parent of the run folder at the centre
name = "{name}"    # the run folder; a run of this name that is there already goes on
python = ""        # the Python that has fl_lightning; empty: that of the command fl-train
sites = ""         # under Flower's simulation engine: the folder of site-0.npz, ..., where nodes keep their state, too
public = ""        # npz with x_public, where the method works on public samples at the centre
gather = 600       # seconds to wait for all sites
visit = 3600       # seconds for one answer of a site
again = 90         # seconds after which an unanswered message is sent again; then twice as many, and so on
"""

_PAGE = """# {name}: the commands

Written by `fl-train deploy` of fl_lightning {version}. The centre and every site need two environments: one with
fl_lightning {version}, whose `bin` is on the PATH of the processes below, and one with Flower:

```
uv venv flower && uv pip install --python flower/bin/python flwr=={flwr}
```

Nothing is to call home, and nothing is to be installed by a run. Set this wherever a command of Flower runs:

```
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
```

## The centre

Keys and certificates: `ca.crt`, `server.crt` and `server.key` are the centre's; every site makes a key of its own
(`ssh-keygen -t ecdsa -b 384 -N "" -f site`) and gives the centre `site.pub`.

```
flower-superlink --host 0.0.0.0 --port 8000 --disable-runtime-dependency-installation --database state.db \\
    --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key --enable-supernode-auth
flwr supernode register site.pub centre        # once for each site, before its SuperNode starts
flwr run . centre --stream
```

`centre` is a section of `$FLWR_HOME/config.toml`:

```
[superlink.centre]
address = "centre.example.org:8000"
root-certificates = "ca.crt"
```

## A site

`client` is its number, from 0; `site` a name for messages; `data` an npz file with x_train, y_train, x_test and y_test
(and x_validation, y_validation where the method chooses on validation data), which stays where it is; `folder` is where
its model and state are kept.

```
flower-supernode --superlink centre.example.org:8000 --root-certificates ca.crt --auth-supernode-private-key site \\
    --node-config 'client=0 site="north" data="/srv/north.npz" folder="/srv/federation"'
```

A SuperNode that was killed cannot come back for up to 60 seconds: have a supervisor start it again (systemd:
Restart=always, RestartSec=10). A site that cannot be trusted may send answers as large as it likes, which the SuperLink
stores before they can be refused: limit its memory and the disk of `state.db` (systemd: MemoryMax; a quota).

## Afterwards

`runs/{name}` at the centre is a run folder: `fl-train report runs/{name}`. Each site has its own model in
`FOLDER/{name}`: `fl-train export --run FOLDER/{name} --client 0 --out model.safetensors`. After an interruption the
same `flwr run` goes on from the last finished round.
"""
