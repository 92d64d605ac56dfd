"""What the commands of `fl-train` do. The engine is imported last: bad input is answered at
once."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.cli import ends
from fl_lightning.cli import folder as runs
from fl_lightning.cli.resolve import Start, complete, method_entry, plan, start_of, to_yaml
from fl_lightning.cli.schema import SUFFIXES
from fl_lightning.cli.settings import Layer, Settings, read_line
from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import check, flat
from fl_lightning.configuration.explain import explained
from fl_lightning.foundation import launcher, signals
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.files import write_whole
from fl_lightning.foundation.metric import BY_TASK, FURTHER
from fl_lightning.results.provenance import name_of

if TYPE_CHECKING:
    from fl_lightning.configuration.config import Config


def fit(argv: list[str]) -> None:
    """Train, in a new run folder or (`--resume`) in the named one."""
    line = read_line(argv)
    trained(line.layers, line.first, argv)


def trained(layers: list[Layer], first: str | None, words: list[str] | None = None) -> Path | None:
    """Train as `layers` say, in a folder named after the config `first` or the method; None where
    that is only shown.

    `words`: the command line, which goes on with a run that is resumed.

    Returns:
        The run folder.
    """
    start = start_of(layers)
    # To resolve a config takes seconds: it imports torch.
    with signals.leaving(lambda: "fl-train: stopped before the run began; nothing is written"):
        config = _config_to_train(layers, first, start)
    if start.print_config:
        print(to_yaml(config), end="")
        return None
    again = ["fl-train", "fit", *words] if words and start.name and start.resume else None
    stem = Path(first or "").stem or name_of(config)
    with runs.opened(start, stem, config) as folder:
        goes_on = partial(runs.goes_on, folder, again)
        with signals.leaving(goes_on):  # it takes seconds
            from fl_lightning.run import fit as engine
        with runs.when_stopped(goes_on):
            engine(config, folder, start.resume)
    return folder


def _config_to_train(layers: list[Layer], first: str | None, start: Start) -> Config:
    """The config of a run that begins or goes on as `layers` say; `BadInput` where it may not.

    Resumed without a config file (`first`), a run continues as it was, save for what the flags say.
    """
    saved = runs.saved_layer(Path(start.out) / start.name) if start.resume and start.name else None
    config = plan([saved, *layers] if saved and not first else layers)
    if start.print_config:
        return complete(config)
    runs.check_name(start)
    runs.check_first_start(start, first is not None)
    config = complete(config)
    runs.check_no_key(config)
    if saved:
        runs.check_goes_on(
            saved, config, Path(start.out) / str(start.name), start.accept_changed_code
        )
    return config


def test(argv: list[str]) -> None:
    """Judge the models of a finished run again and print their scores."""
    line = read_line(argv, "test")
    values, folder = line.values, Path(line.values.run)
    config = load(folder, line.layers)
    from fl_lightning.run import test as engine

    scores = engine(config, folder, values.checkpoint)
    if launcher.rank() > 0:
        return
    for name, value in scores.items():
        if not isinstance(value, list):  # one number for each client is no table to read
            print(f"{name:28s} {value}")


def export(argv: list[str]) -> None:
    """Write one client's model, and beside it the file that loads it and predicts raw rows."""
    values = read_line(argv, "export").values
    folder, out = Path(values.run), Path(values.out)
    runs.check_path("run", folder)
    beside = _free(out, values.out, SUFFIXES[values.format])
    if (folder / ends.SITE).is_file():
        check(
            "format",
            values.format,
            values.format == "safetensors",
            "of a site's folder safetensors alone",
        )
        number = int(values.client) if values.client.isdecimal() else -1
        check(
            "client",
            values.client,
            number >= 0,
            "of a site's folder it must be the client's number",
        )
        config, facts = ends.exported(folder, number, out)
    else:
        for path in (
            value
            for _, value in flat(runs.saved_layer(folder) or {})
            if str(value).startswith("__main__.")
        ):
            name = path.rpartition(".")[2]
            way = (
                f"move the class to a file, my_parts.py, and write my_parts.{name} in the run's "
                f"config.yaml"
            )
            what = f"{name} was defined in a script (__main__), which export cannot import: {way}"
            check("run", values.run, False, what)
        config = load(folder)
        from fl_lightning.run import export as engine

        facts = engine(config, folder, values.client, out, values.checkpoint, values.format)
    _write_loader(
        beside, folder, facts.get("whose", f"client {values.client}"), out, facts, values.format
    )


def report(argv: list[str]) -> None:
    """Write one HTML page on the named run folders; prints where it is."""
    from fl_lightning.lab.study.folder import StudyFolder

    line = read_line(argv, "report")
    words, values = line.words, line.values
    check("run", None, bool(words), "it must be given: fl-train report RUN [RUN ...]")
    for word in words:
        runs.check_path("run", Path(word))
    study = StudyFolder(Path(words[0]))
    # of which methods are not compared: then its runs
    if study and len(words) == 1 and not study.is_regression():
        from fl_lightning.cli.compare import report as report_study

        report_study(words[0], values)
        return
    require("report", "report", words[0])
    from fl_lightning.lab.report.page import MARKER, render
    from fl_lightning.results.runs import load, run_folders

    loaded = load(run_folders([Path(word) for word in words]))
    given = (
        str(Path(words[0] if len(words) == 1 else ".") / "report.html")
        if values.out is None
        else values.out
    )
    out = runs.check_out("out", given, ".html", MARKER, "report")
    page, figures = render(loaded), out.with_name(f"{out.stem}-figures")
    if values.figures is not None:
        from fl_lightning.lab.report import figures as charts
        from fl_lightning.lab.report import vector

        drawn = charts.draw(loaded) | charts.relations(loaded)
        vector.write(drawn, figures, values.figures)
    write_whole(out, page)
    print(f"report: {out}" + (f"\nfigures: {figures}" if values.figures is not None else ""))


def join(argv: list[str]) -> None:
    """Write a new client's model, and beside it (and on the screen) the lines that load it; the run
    stays as it is."""
    values = read_line(argv, "join").values
    folder, out = Path(values.run), Path(values.out)
    config = load(folder)
    beside = _free(out, values.out)
    from fl_lightning.run import join as engine

    facts = engine(config, folder, values.data, out, values.rounds, values.architecture)
    _write_loader(beside, folder, "a new client", out, facts)
    scores = [
        by for m in (*BY_TASK.values(), *FURTHER.values()) for by in (m.by("received"), m.name)
    ]
    for name in ("labelled", "rule", *scores, "loss"):
        if name in facts:
            print(f"# {name}: {facts[name]}")
    if "loss" in facts:
        rounds = config.federation.rounds
        print(
            f"# rounds of local training before this score: {facts['trained']} (--rounds); the "
            f"run had {rounds}"
        )


def _write_loader(
    beside: Path,
    folder: Path,
    whose: str,
    out: Path,
    facts: dict[str, Any],
    kind: str = "safetensors",
) -> None:
    """Write the file that loads the model, and say how it is used."""
    from fl_lightning.exporting.loader import loader

    text = loader(folder, whose, out, facts, kind)
    try:
        write_whole(beside, text)
    except RunFailed:  # a full disk: once it has room, the same command is to find its names free
        out.unlink(missing_ok=True)
        raise
    print(
        "".join(line for line in text.splitlines(keepends=True)[:2] if line.startswith("#")), end=""
    )
    print(
        f"from {beside.stem} import predict  # {beside}: predict(rows) names the class of each "
        f"raw row"
    )


def _free(out: Path, given: str, suffix: str = ".safetensors") -> Path:
    """The `.py` to be written beside the file `out`, which Python can import; `BadInput` unless
    both can be written."""
    stem = re.sub(r"^(?=\d)|\W", "_", runs.check_out("out", given, suffix).stem)
    # what the loader imports
    taken = {*sys.stdlib_module_names, "torch", "numpy", "safetensors", "onnxruntime"}
    check(
        "out",
        given,
        stem not in taken,
        f"the {stem}.py beside it would hide the module {stem}; choose another name",
    )
    loader = out.with_name(f"{stem}.py")
    for path in (out, loader):
        check("out", given, not path.exists(), f"{path} exists, and is not written over")
    return loader


def fit_help(argv: list[str]) -> str:
    """What to say of the method that a command line names, with `--help` on it; nothing where it
    names none."""
    words = [word for word in argv if word not in ("-h", "--help")]
    if not {word.partition("=")[0] for word in words} & {"--method", "--config"}:
        return "\nArguments of a method: fl-train fit --method NAME --help\n"
    return "\n" + _of_method(Settings.merged(read_line(words).layers).method.class_path)


def _of_method(class_path: str) -> str:
    entry = catalogue.lookup("methods", class_path)
    return explained(entry.name if entry else class_path, method_entry(class_path))


def list_names(argv: list[str]) -> None:
    """Print what can be chosen by name, one line each; of single methods, their arguments."""
    if argv and argv[0] in ("-h", "--help"):
        print(
            f"usage: fl-train list [{'|'.join(catalogue.KINDS)}]\n       fl-train list methods "
            f"NAME [NAME ...]"
        )
        return
    if argv[1:] and argv[0] == "methods" and not set(argv) <= set(catalogue.KINDS):
        classes = [catalogue.find("methods", "list", word).class_path for word in argv[1:]]
        print("\n".join(map(_of_method, classes)), end="")
        return
    for word in argv:
        if word not in catalogue.KINDS:
            near = catalogue.did_you_mean(word, catalogue.KINDS)
            raise BadInput("list", word, f"no such kind{near}; kinds: {', '.join(catalogue.KINDS)}")
    for kind in argv or catalogue.KINDS:
        if len(argv) != 1:
            print(kind)
        indent = "" if len(argv) == 1 else "  "
        width = max(map(len, catalogue.table(kind)))
        for family, entries in catalogue.families(kind).items():
            if family:
                print(f"{indent}{family}:")
            for entry in entries:
                print(f"{indent}{'  ' if family else ''}{entry.name:{width}s}  {entry.summary}")


def load(folder: Path, flags: list[Layer] | None = None) -> Config:
    """The resolved config of the run in `folder`, with `flags` over it."""
    saved = runs.saved_layer(folder)
    if saved is None:
        raise BadInput("run", str(folder), f"there is no run: {runs.CONFIG} is missing")
    allowed = (
        f"its clients' models and data are at their sites: fl-train export --run "
        f"FOLDER/{folder.name} there"
    )
    check("run", str(folder), not (folder / ends.CENTER).is_file(), allowed)
    return complete(plan([saved, *(flags or [])]))
