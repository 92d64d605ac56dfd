"""What the commands of `fl-train` do. The engine is imported last: bad input is answered at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning import catalogue
from fl_lightning.cli import folder as runs
from fl_lightning.cli.parser import (
    export_parser,
    fit_parser,
    join_parser,
    keys,
    relative_parser,
    report_parser,
    test_parser,
    typed,
)
from fl_lightning.cli.resolve import complete, plan, start_of, to_yaml
from fl_lightning.cli.settings import Layer, Settings, apart, read_flags
from fl_lightning.errors import BadInput
from fl_lightning.metric import MODELS

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from fl_lightning.config import Config


def fit(argv: list[str]) -> None:
    """Train, in a new run folder or (`--resume`) in the named one."""
    parser = fit_parser()
    if _asks_help(argv, parser):
        return
    layers = read_flags(argv, keys(parser))
    start = start_of(layers)
    first_config = _first_config(argv)
    saved = runs.saved_layer(Path(start.out) / start.name) if start.resume and start.name else None
    # Resumed without a config, a run continues as it was, save for what the flags say.
    config = plan([saved, *layers] if saved and not first_config else layers)
    if not start.print_config:
        runs.check_name(start)
        runs.check_first_start(start, first_config is not None)
    config = complete(config)
    if start.print_config:
        print(to_yaml(config), end="")
        return
    runs.check_no_key(config)
    if saved:
        runs.check_goes_on(saved, config, Path(start.out) / str(start.name))
    method = config.method.class_path.rpartition(".")[2].lower()
    from fl_lightning.run import fit as engine

    with runs.opened(start, Path(first_config).stem if first_config else method, config) as folder:
        engine(config, folder, start.resume)


def test(argv: list[str]) -> None:
    """Judge the models of a finished run again and print their scores."""
    parser = test_parser()
    if _asks_help(argv, parser):
        return
    values, flags = _run_and_flags(argv, parser)
    folder = Path(values.run)
    config = load(folder, flags)
    from fl_lightning.run import test as engine

    scores = engine(config, folder, values.checkpoint)
    if runs.outer_rank() > 0:
        return
    for name, value in scores.items():
        if not isinstance(value, list):  # one number for each client is no table to read
            print(f"{name:28s} {value}")


def export(argv: list[str]) -> None:
    """Write one client's model as safetensors, and beside it (and on the screen) the lines that load it."""
    parser = export_parser()
    if _asks_help(argv, parser):
        return
    values = typed(parser, Settings.merged(read_flags(argv, keys(parser))).plain)
    folder, out = Path(values.run), Path(values.out)
    config = load(folder)
    loader = _free(out, values.out)
    from fl_lightning.run import export as engine

    facts = engine(config, folder, values.client, out, values.checkpoint)
    text = _snippet(config, folder, f"client {values.client}", out, facts)
    loader.write_text(text, encoding="utf-8")
    print(text, end="")


def report(argv: list[str]) -> None:
    """Write one HTML page on the named run folders; prints where it is."""
    parser = report_parser()
    if _asks_help(argv, parser):
        return
    words, flags = apart(argv)
    values = typed(parser, Settings.merged(read_flags(flags, keys(parser))).plain)
    if not words:
        raise BadInput("run", None, "it must be given: fl-train report RUN [RUN ...]")
    from fl_lightning.files import atomic_write
    from fl_lightning.report import MARKER, load, render, run_folders

    found = load(run_folders([Path(word) for word in words]))
    out = Path(values.out) if values.out is not None else Path(words[0] if len(words) == 1 else ".") / "report.html"
    _check_page(out, MARKER)
    page = render(found)
    with atomic_write(out) as aside:
        aside.write_text(page, encoding="utf-8")
    print(f"report: {out}")
    if values.figures is not None:
        from fl_lightning.report import vector

        vector.write(found, folder := out.with_name(f"{out.stem}-figures"), values.figures)
        print(f"figures: {folder}")


def join(argv: list[str]) -> None:
    """Write a new client's model, and beside it (and on the screen) the lines that load it; the run stays as it is."""
    parser = join_parser()
    if _asks_help(argv, parser):
        return
    values = typed(parser, Settings.merged(read_flags(argv, keys(parser))).plain)
    folder, out = Path(values.run), Path(values.out)
    config = load(folder)
    loader = _free(out, values.out)
    if values.rounds < 0:
        raise BadInput("rounds", values.rounds, "it must be 0 or more")
    from fl_lightning.run import join as engine

    facts = engine(config, folder, values.data, out, values.rounds)
    text = _snippet(config, folder, "a new client", out, facts)
    loader.write_text(text, encoding="utf-8")
    print(text, end="")
    for name in ("labelled", "accuracy_heard", "accuracy", "mae_heard", "mae"):
        if name in facts:
            print(f"# {name}: {facts[name]}")


def relative(argv: list[str]) -> None:
    """Print, and write to `relative.json`, how a run's clients fare beside training alone; the reference is kept."""
    parser = relative_parser()
    if _asks_help(argv, parser):
        return
    values = typed(parser, Settings.merged(read_flags(argv, keys(parser))).plain)
    folder = Path(values.run)
    config = load(folder)
    from fl_lightning.cli.relative import compare

    for name, value in compare(config, folder).items():
        print(f"{name:28s} {value}")


def compare(argv: list[str]) -> None:
    """Compare the methods of a study, or of run folders."""
    from fl_lightning.cli.compare import compare as show

    show(argv)


def dashboard(argv: list[str]) -> None:
    """Save the project's workspace at W&B."""
    from fl_lightning.cli.dashboard import dashboard as save

    save(argv)


def _free(out: Path, given: str) -> Path:
    """The `.py` that will stand beside the safetensors file `out`; `BadInput` unless both can be written."""
    loader = out.with_suffix(".py")
    if not out.parent.is_dir():
        raise BadInput("out", given, f"there is no folder {out.parent}")
    if out.suffix != ".safetensors":
        raise BadInput("out", given, "it must end with .safetensors")
    for path in (out, loader):
        if path.exists():
            raise BadInput("out", given, f"{path} exists, and is not written over")
    return loader


def submit(argv: list[str]) -> None:
    """Hand a fit to SLURM."""
    from fl_lightning.cli.submit import submit as hand_over

    hand_over(argv)


def study(argv: list[str]) -> None:
    """Run a grid of methods, settings and seeds."""
    from fl_lightning.cli.study import study as run

    run(argv)


def plan_run(argv: list[str]) -> None:
    """Say what a fit would take."""
    from fl_lightning.cli.planning import plan as show

    show(argv)


def status(argv: list[str]) -> None:
    """Print where the runs of a folder stand."""
    from fl_lightning.cli.status import status as show

    show(argv)


def list_names(argv: list[str]) -> None:
    """Print what can be chosen by name, one line each."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: fl-train list [{'|'.join(catalogue.KINDS)}]")
        return
    for word in argv:
        if word not in catalogue.KINDS:
            near = catalogue.did_you_mean(word, catalogue.KINDS)
            raise BadInput("list", word, f"no such kind{near}; kinds: {', '.join(catalogue.KINDS)}")
    for kind in argv or catalogue.KINDS:
        if len(argv) != 1:
            print(kind)
        indent = "" if len(argv) == 1 else "  "
        for family, entries in catalogue.families(kind).items():
            if family:
                print(f"{indent}{family}:")
            for entry in entries:
                print(f"{indent}{'  ' if family else ''}{entry.name:20s} {entry.summary}")


def _check_page(out: Path, marker: str) -> None:
    """Raise `BadInput` unless a page may be written to `out`: nothing but an earlier page is written over."""
    if out.suffix != ".html":
        raise BadInput("out", str(out), "it must end with .html")
    if not out.parent.is_dir():
        raise BadInput("out", str(out), f"there is no folder {out.parent}")
    if out.exists() and not (out.is_file() and marker.encode() in out.read_bytes()[:1000]):
        raise BadInput("out", str(out), "it exists and is no report, and is not written over")


def load(folder: Path, flags: list[Layer] | None = None) -> Config:
    """The resolved config of the run in `folder`, with `flags` over it."""
    saved = runs.saved_layer(folder)
    if saved is None:
        raise BadInput("run", str(folder), f"there is no run: {runs.CONFIG} is missing")
    return complete(plan([saved, *(flags or [])]))


def _asks_help(argv: list[str], parser: ArgumentParser) -> bool:
    asks = "-h" in argv or "--help" in argv
    if asks:
        parser.print_help()
    return asks


def _first_config(argv: list[str]) -> str | None:
    """The first `--config` on the command line: it names the run."""
    for i, word in enumerate(argv):
        if word == "--config":
            return argv[i + 1]
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def _run_and_flags(argv: list[str], parser: ArgumentParser) -> tuple[Namespace, list[Layer]]:
    """All values, and the layers of those flags that are keys of a run."""
    layers = read_flags(argv, keys(parser))
    values = typed(parser, Settings.merged(layers).plain)
    return values, [layer for layer in layers if not {"run", "checkpoint"} & layer.keys()]


def _snippet(config: Config, folder: Path, whose: str, out: Path, facts: dict[str, Any]) -> str:
    """Python that loads the exported model."""
    module, _, name = facts["class_path"].rpartition(".")
    arguments = ", ".join(f"{key}={value!r}" for key, value in facts["arguments"].items())
    return (
        f"# Model of {whose} ({MODELS[facts['kind']]}), round {facts['round']} of {folder}.\n"
        "from safetensors.torch import load_model\n\n"
        f"from {module} import {name}\n\n"
        f"model = {name}({arguments})\n"
        f'load_model(model, "{out.name}")\n'
        "model.eval()\n"
    )
