"""The lines of device_day.py as tables in Markdown: for docs/performance.md first, then for
docs/devices.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

Line = dict[str, Any]
RATIO = "**{ratio:.2f}** [{low:.2f}, {high:.2f}]"
TIMES = {
    "workload": "{workload} ({data})",
    "side": "{side}",
    "s a round": "{seconds:.3g}",
    "against the faster hand loop [95 %]": RATIO,
    "turns": "{turns}",
    "peak, MiB": "{peak_mib}",
    "greatest difference of weights, loop and hand loop": "{weights_differ:.0e}",
    "not timed": "{error}",
}
WORK = {
    "workload": "{workload}",
    "side": "{side}",
    "kernels a round": "{kernels:,.0f}",
    "launches": "{launches:,.0f}",
    "waits of the host": "{waits:,.0f}",
    "busy, ms": "{busy_ms:.3g}",
    "idle, %": "{idle:.0f}",
}
SERVERS = {
    "server's step, ResNet-18": "{clients}, {solver}",
    "s": "{seconds:.3g}",
    "bare products, s": "{against_seconds:.3g}",
    "ratio [95 %]": RATIO,
    "further memory, MiB": "{extra_mib:.0f}",
}
STUDIES = {
    "study": "{seeds} seeds, {rounds} rounds, {side}",
    "s": "{seconds:.3g}",
    "against the loop": "**{ratio:.2f}**",
}
TESTS = {"path": "{path}", "passed": "{passed}", "failed": "{failed}", "skipped": "{skipped}"}
FAILED = {"failed": "`{test}`", "error": "{error}"}
SANITIZERS = {
    "sanitizer": "{tool}",
    "run": "{run}",
    "exit": "{exit}",
    "error": "{error}",
    "s": "{seconds}",
}
ITEMS = {"item": "`{item}`", "outcome": "{outcome}", "s": "{seconds}"}
PATHS = {
    "golden runs: methods, callbacks, failing clients, interrupted runs": ("numbers_of_the_cpu",),
    "`loop`, `vmap`, `auto`": ("executors_agree", "stacked_clients_repeat", "auto_picks"),
    "banks `host` and `disk`": ("where_models_lie", "models_away"),
    "precisions, `channels_last`": ("precisions",),
    "resumed on another kind of device": ("goes_on_on_another",),
    "draws of the device; a deterministic run": ("dropout", "deterministic"),
    "out of memory": ("too_large",),
    "several ranks": ("two_ranks",),
}
"""What docs/devices.md lists, by words of the tests' names."""


def by_item(texts: Sequence[str]) -> dict[str, list[Line]]:
    """The lines of each item's last run; a line that was cut off while it was written is left
    out."""
    items: dict[str, list[Line]] = {}
    for written in (line for text in texts for line in text.splitlines()):
        try:
            line: Line = json.loads(written)
        except ValueError:
            continue
        if "begun" in line:
            items[line["item"]] = []
        items.setdefault(line["item"], []).append(line)
    return items


def table(columns: dict[str, str], lines: Sequence[Line]) -> Iterator[str]:
    """Of lines that have something to show in a column; what a line has not stays empty."""
    rows = []
    for line in lines:
        row = []
        for form in columns.values():
            try:
                row.append(form.format(**line).replace("|", "/"))
            except KeyError:
                row.append("")
        rows.append(row)
    if rows:
        yield from ("", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|")
        yield from (f"| {' | '.join(row)} |" for row in rows)


def sides(lines: Sequence[Line]) -> list[Line]:
    """All that the lines of an item say of a side, and of the item, in one line for each side."""
    merged: dict[str, Line] = {}
    for line in lines:
        if "side" in line:
            merged.setdefault(line["side"], {}).update(line)
    about = {
        key: value
        for line in lines
        if "side" not in line
        for key, value in line.items()
        if key != "seconds"
    }
    return [about | line for line in merged.values()]


def a_run(line: Line) -> Line:
    """What the device did in a round, for one of the runs that trained together, and the share in
    which it was idle."""
    many = line["runs"] if line["side"] == "together" else 1
    counts = {key: line[key] / many for key in ("kernels", "launches", "waits")}
    busy = line["busy"] / many
    return line | counts | {"busy_ms": 1000 * busy, "idle": 100 * (1 - busy / line["seconds"])}


def tests(lines: Sequence[Line]) -> Iterator[Line]:
    """How many tests had which outcome, by what they test."""
    paths = {
        line["test"]: next(
            (p for p, words in PATHS.items() if any(w in line["test"] for w in words)), "others"
        )
        for line in lines
    }
    for path in [*PATHS, "others"]:
        outcomes = [line["outcome"] for line in lines if paths[line["test"]] == path]
        if outcomes:
            yield {"path": path} | {
                kind: outcomes.count(kind) for kind in ("passed", "failed", "skipped")
            }


def tables(texts: Sequence[str]) -> str:
    """All of it, from the texts of the files."""
    items = by_item(texts)
    timed = [
        line for name, lines in items.items() if name.startswith("rounds-") for line in sides(lines)
    ]
    servers = [
        line
        for name, lines in items.items()
        if name.startswith("server-")
        for line in lines
        if "solver" in line
    ]
    study, suite = (
        sides(items.get("study", [])),
        [line for n in ("suite", "golden") for line in items.get(n, [])],
    )
    loop = next(
        (line["seconds"] for line in study if line["side"] == "loop" and "seconds" in line), None
    )
    study = [
        line | ({"ratio": line["seconds"] / loop} if loop and "seconds" in line else {})
        for line in study
    ]
    suite, sanitizers = [line for line in suite if "test" in line], items.get("sanitizers", [])
    ends = [next((line for line in lines if "ended" in line), {}) for lines in items.values()]
    about = {
        key: value
        for line in items.get("machine", [])
        if "ended" not in line
        for key, value in line.items()
    }
    return "\n".join(
        [
            ", ".join(f"{key}: {value}" for key, value in about.items() if key != "item"),
            "",
            "## For docs/performance.md",
            *table(TIMES, timed),
            *table(
                WORK, [a_run(line) for line in timed if "kernels" in line and "seconds" in line]
            ),
            *table(SERVERS, sorted(servers, key=lambda line: line["clients"])),
            *table(STUDIES, study),
            "",
            "## For docs/devices.md",
            *table(TESTS, list(tests(suite))),
            *table(FAILED, [line for line in suite if line["outcome"] == "failed"]),
            *table(SANITIZERS, [line for line in sanitizers if "tool" in line]),
            *(f"\nNot run: {line['skipped']}." for line in sanitizers if "skipped" in line),
            "",
            "## Items",
            *table(
                ITEMS,
                [
                    {"item": name, "outcome": "cut off"} | end
                    for name, end in zip(items, ends, strict=True)
                ],
            ),
        ]
    )
