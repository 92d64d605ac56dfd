"""What was said of stored runs, and is to be said of them for as long as they are read.

`runs.tar.xz`, `study.tar.xz` (of study.yaml) and `archive.zip` are folders in the format that is
written now. `expected.tar.xz` holds what the commands below printed of them. After a change that is
meant to move what is printed:

    python tests/results/stored.py

writes it anew, and prints which files changed; name the change in CHANGELOG.md.
"""

import contextlib
import io
import json
import re
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SAFELY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
EXPECTED = HERE / "expected.tar.xz"
RUNS = ("kapc-0", "kapc-1", "fedavg-0", "local-0")
OF_STUDY = " ".join(
    f"study/runs/data.alpha=0.5/{name}/seed-{s}"
    for name in ("kapc", "fedprox,mu=0.1")
    for s in (0, 1)
)
COMMANDS = {
    "compare.json": "compare study --format json",
    "compare.txt": "compare study",
    "compare.csv": "compare study --format csv",
    "compare.tex": "compare study --format latex",
    "compare-after.json": "compare study --judge after --format json",
    "compare-auroc.json": "compare study --metric auroc --format json",
    "compare-target.json": "compare study --target 0.4 --baseline kapc --format json",
    "compare-archive.json": "compare archive.zip --format json",
    "compare-runs.json": f"compare {OF_STUDY} --judge before --format json",
    "reproduce.json": "reproduce study.yaml --out study --no-run --format json",
    "reproduce.txt": "reproduce study.yaml --out study --no-run",
    "status-study.txt": "status study",
}
"""By file, the command whose output it is, in a folder where `unpacked` has been."""
REPORTS = {
    "report.html": [f"runs/{name}" for name in RUNS],
    "report-extended.html": ["extended", "runs/kapc-0"],
    "report-regression.html": ["runs/fields"],
    "report-study.html": ["study/runs/data.alpha=0.1"],
}


def unpacked(folder):
    """The stored folders; and `extended`, a run that was asked for more rounds and has not ended
    again."""
    for name in ("runs", "study"):
        with tarfile.open(HERE / f"{name}.tar.xz") as held:
            held.extractall(folder / name, **SAFELY)
    (folder / "archive.zip").write_bytes((HERE / "archive.zip").read_bytes())
    (folder / "study.yaml").write_bytes((HERE / "study.yaml").read_bytes())
    with tarfile.open(HERE / "runs.tar.xz") as held:
        members = [m for m in held.getmembers() if m.name.startswith("local-0/")]
        held.extractall(folder, members, **SAFELY)
    (folder / "local-0").rename(folder / "extended")
    config = folder / "extended/config.yaml"
    config.write_text(re.sub(r"(?m)^  rounds: 3$", "  rounds: 5", config.read_text()))
    (folder / "extended/relation/round-0002.npz").write_bytes(b"damaged")


def printed(command):
    """What a command prints."""
    from fl_lightning.cli import main

    screen = io.StringIO()
    with (
        contextlib.redirect_stdout(screen),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        main(command.split())
    return screen.getvalue()


def page(runs, out):
    """A report without its style, its script and its charts, which another version of matplotlib
    draws otherwise; pictures of relations as they are."""
    printed(f"report {' '.join(runs)} --out {out}")
    text = out.read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    text = re.sub(r"fl-train report [\d.]+", "", text)
    text = re.sub(r"<(script|style|svg)\b.*?</\1>", "", text, flags=re.S)
    return text + "\n" + json.dumps(json.loads(data), indent=0)


def made(folder):
    """All files of `EXPECTED`, from the folders in `folder`, which is the working directory."""
    for name, command in COMMANDS.items():
        yield name, printed(command)
    for name, runs in REPORTS.items():
        yield name, page(runs, folder / name)


def expected():
    """What `EXPECTED` holds."""
    with tarfile.open(EXPECTED) as held:
        return {
            member.name: held.extractfile(member).read().decode() for member in held.getmembers()
        }  # type: ignore[union-attr]


def main():
    before = expected() if EXPECTED.exists() else {}
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        unpacked(Path(name))
        found = dict(made(Path(name)))
    with tarfile.open(EXPECTED, "w:xz", preset=9) as held:
        for file, text in sorted(found.items()):
            info = tarfile.TarInfo(file)
            info.size = len(text.encode())
            held.addfile(info, io.BytesIO(text.encode()))
    print(
        "changed:",
        ", ".join(file for file in found if found[file] != before.get(file)) or "nothing",
    )


if __name__ == "__main__":
    main()
