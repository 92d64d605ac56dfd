"""What every shipped config and study resolves to, in `resolved.json`, so that a change of one is
seen.

Of a config those values are kept that most configs do not have; of a study's runs with its first
seed, those that the first run does not have. `python tests/configs/resolved.py NAME [NAME ...]`
keeps those of some anew, `--all` of all.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import yaml

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.resolve import to_yaml
from fl_lightning.lab.study import studyfile
from fl_lightning.lab.study.grid import Study
from fl_lightning.lab.study.launch import resolved

FILE = Path(__file__).with_name("resolved.json")
FOLDER = Path(__file__).resolve().parents[2] / "configs"
GONE = "(not there)"


def configs():
    """Names of the shipped configs, and paths of those that are not listed."""
    listed = list(catalogue.table("configs"))
    others = (
        set(FOLDER.rglob("*.yaml"))
        - set((FOLDER / "studies").rglob("*.yaml"))
        - set(FOLDER.glob("*.yaml"))
    )
    return listed + [path.relative_to(FOLDER).as_posix() for path in sorted(others)]


def studies():
    """Names of the shipped studies."""
    return list(catalogue.table("studies"))


def flat(value, key=""):
    """Nested values by dotted key; an empty mapping counts as a value."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    return {
        k: v
        for name, inner in value.items()
        for k, v in flat(inner, f"{key}.{name}" if key else str(name)).items()
    }


def plain(config):
    """All values of a resolved config, its seed apart."""
    values = flat(json.loads(json.dumps(yaml.safe_load(to_yaml(config)))))
    values.pop("seed")
    return values


def beside(values, common):
    """What of `values` is not in `common`."""
    return {k: v for k, v in values.items() if k not in common or common[k] != v} | {
        k: GONE for k in common if k not in values
    }


def of_study(name):
    """The values of each run of a study by its folder, for the first of its seeds."""
    asked = Study.of(studyfile.read(name))
    _, pairs = resolved(asked)
    return {run.folder: plain(c) for run, c in pairs if run.seed == asked.seeds[0]}


def of_config(name):
    """The values of `fl-train fit --config NAME`."""
    from fl_lightning.configuration.flags import layers_of_flags, read_flags
    from fl_lightning.configuration.resolve import resolve

    path = str(FOLDER / name) if name.endswith(".yaml") else name
    return plain(resolve(layers_of_flags(read_flags(["--config", path])[1])[0]))


def common_of(all_values):
    """The values that more than half have."""
    many = list(all_values)
    counts = Counter((key, json.dumps(value)) for values in many for key, value in values.items())
    return {
        key: json.loads(value)
        for (key, value), count in sorted(counts.items())
        if 2 * count > len(many)
    }


def kept():
    """What is kept."""
    content = json.loads(FILE.read_text())
    return content


def write(content):
    """Keep it, a line for each config and study."""
    parts = [
        f"{json.dumps(part)}: {{\n"
        + ",\n".join(f"{json.dumps(k)}: {_line(v)}" for k, v in sorted(inner.items()))
        + "\n}"
        for part, inner in content.items()
    ]
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _line(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def differences(now, kept_values):
    """Keys whose values are others than those kept, with both. Keys that have come since are
    none."""
    return {k: (v, now.get(k, GONE)) for k, v in kept_values.items() if now.get(k, GONE) != v}


def whole(common, own):
    """The reverse of `beside`."""
    return {k: v for k, v in (common | own).items() if v != GONE}


def main(names):
    """Keep values anew."""
    os.environ.setdefault("WANDB_MODE", "offline")
    content = {"common": {}, "configs": {}, "studies": {}} if names == ["--all"] else kept()
    wanted = [*configs(), *studies()] if names == ["--all"] else names
    found = {name: of_config(name) for name in configs() if name in wanted}
    content["common"] = content["common"] or common_of(found.values())
    content["configs"] |= {
        name: beside(values, content["common"]) for name, values in found.items()
    }
    for name in (name for name in studies() if name in wanted):
        by_run = of_study(name)
        first = next(iter(by_run.values()))
        content["studies"][name] = {
            "first": beside(first, content["common"]),
            "runs": {folder: beside(values, first) for folder, values in by_run.items()},
        }
        print(name, len(by_run), file=sys.stderr)
    write(content)


if __name__ == "__main__":
    main(sys.argv[1:])
