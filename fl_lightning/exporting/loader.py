"""The Python file beside an exported model: it loads the model and predicts raw rows, mostly
without this package."""

from __future__ import annotations

import inspect
import pprint
from pathlib import Path
from typing import Any

from fl_lightning.exporting import plain
from fl_lightning.exporting.source import standalone
from fl_lightning.foundation import cells
from fl_lightning.foundation.metric import MODELS

_END = '''

def predict(rows):
    """Return the class names of raw rows (of a regression numbers); `inputs` describes a row."""
    with torch.no_grad():
        return names(ABOUT, model(inputs(ABOUT, rows)))


def predict_proba(rows):
    """Return the probability of each class, by its name, for each raw row."""
    with torch.no_grad():
        chances = probabilities(ABOUT, model(inputs(ABOUT, rows))).tolist()
    return [dict(zip(ABOUT["class_names"], row)) for row in chances]
'''
_OF_TABLE = '''

def main() -> None:
    """Print a prediction for each row of the table that the command line names."""
    names = [name for name, _ in ABOUT["columns"]]
    parser = argparse.ArgumentParser(description="Print a prediction for each row of a table.")
    parser.add_argument("file", metavar="rows.csv", help=f"its header names the columns {', '.join(names)}")
    parser.add_argument("--proba", action="store_true", help="print the probability of each class, as CSV")
    arguments = parser.parse_args()
    path = arguments.file
    try:
        encoding = "utf-8-sig" if ABOUT["encoding"] == "utf-8" else ABOUT["encoding"]
        with open(path, newline="", encoding=encoding) as file:
            table = csv.DictReader(file, delimiter=SEPARATORS[ABOUT["separator"]])
            header, rows = table.fieldnames or [], list(table)
    except (OSError, UnicodeError, csv.Error) as error:
        parser.error(f"{path} cannot be read: {error}")
    absent = [name for name in names if name not in header]
    if absent:
        parser.error(f"{path} lacks the columns {', '.join(absent)}; it has {', '.join(header) or 'none'}")
    for number, row in enumerate(rows, 1):
        try:
            inputs(ABOUT, [row])
        except ValueError as error:
            parser.error(f"{path}, row {number}: {error}")
    if arguments.proba:
        writer = csv.DictWriter(sys.stdout, ABOUT["class_names"], lineterminator="\\n")
        writer.writeheader()
        writer.writerows(predict_proba(rows))
        return
    for name in predict(rows):
        print(name)
'''  # noqa: E501
_OF_OTHERS = '''

def main() -> None:
    """Print how to use this file: only rows of a table can be given on a command line."""
    usage = f"from {Path(__file__).stem} import predict; predict(rows) answers each raw row"
    argparse.ArgumentParser(usage=usage, description=inputs.__doc__).parse_args()
    print(f"usage: {usage}")
'''
_MAIN = """

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a name that this terminal cannot show
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)
"""
_IS_THERE = """
if __name__ == "__main__" and not (HERE / {name!r}).is_file():
    print(f"{{HERE / {name!r}}} is not there: this file loads it", file=sys.stderr)
    sys.exit(2)
"""
_GRAPHS = {
    "torch_export": "model = torch.export.load(HERE / {name!r}).module()\n",
    "onnx": '''
try:
    from onnxruntime import InferenceSession

    session = InferenceSession(str(HERE / {name!r}))
except ImportError:  # slower, and in the package onnx itself
    from onnx.reference import ReferenceEvaluator

    session = ReferenceEvaluator(str(HERE / {name!r}))


def model(x):
    """Inputs to class scores."""
    return torch.from_numpy(session.run(None, {{"x": x.numpy()}})[0])
''',
}


def loader_source(
    folder: Path,
    whose: str,
    out: Path,
    facts: dict[str, Any],
    kind: str,
) -> str:
    """Return the text of the Python file that loads an exported model and predicts raw rows.

    Args:
        folder: the run folder.
        whose: the client, as it is named in the file's comments.
        out: path of the exported model, which lies in the same folder.
        facts: result of `run.export`.
        kind: the exported file's format.
    """
    scored = ""
    if "scored_as" in facts:
        scored = (
            f"# The run scored it by the method's own rule, not by model(x) alone: "
            f"{facts['scored_as']}\n"
        )
    head = (
        f"# Model of {whose} ({MODELS[facts['kind']]}), round {facts['round']} of "
        f"{folder}.\n{scored}"
    )
    predicts = "about" in facts
    standard = "import argparse\nimport csv\nimport os\nimport sys\n" if predicts else ""
    here = (
        f"{standard}from pathlib import Path\n\nimport torch\n\nHERE = "
        f"Path(globals().get('__file__', '.')).parent\n"
    )
    here += _IS_THERE.format(name=out.name) if predicts else ""
    if kind == "safetensors":
        imports, model = _construction(facts)
        load = f'load_model(model, str(HERE / "{out.name}"))\nmodel.eval()\n'
        body = f"from safetensors.torch import load_model\n\n{imports}\n\nmodel = {model}\n{load}"
    else:
        body = _GRAPHS[kind].format(name=out.name)
    text = f"{head}from __future__ import annotations\n\n{here}\n{body}"
    if not predicts:
        return text
    about = pprint.pformat(facts["about"], width=120, compact=True, sort_dicts=False)
    functions = [
        inspect.getsource(module).partition(f"{last_import}\n")[2]
        for module, last_import in ((cells, "import Any"), (plain, "import is_empty, number"))
    ]
    imports = (
        "import math\nimport unicodedata\nfrom collections.abc import Mapping, Sequence\n"
        "from datetime import datetime, timedelta\nfrom typing import Any\n"
    )
    main = _OF_TABLE if facts["about"]["input"] == "table" else _OF_OTHERS
    return f"{text}ABOUT = {about}\n\n{imports}{''.join(functions)}{_END}{main}{_MAIN}"


def _construction(facts: dict[str, Any]) -> tuple[str, str]:
    """Return the imports (or a shipped architecture's own source) and the expression that makes the
    model."""
    path, method = facts["component"].class_path, facts.get("built_by")
    adapters = getattr(facts["component"], "adapters", None)
    if not method and adapters is None:
        lines, call = _called(path, facts["arguments"])
        return standalone(path) or lines, call
    kinds = ["Network"] + ["Text"] * (facts["text"] is not None)
    imports = (
        f"from fl_lightning.configuration.components import {', '.join(kinds)}\nfrom "
        f"fl_lightning.models import build\n"
    )
    component = f"Network({path!r}, {facts['arguments']!r}, adapters={adapters!r})"
    text = f", {facts['text']!r}" if facts["text"] is not None else ""
    network = f"build({component}, {facts['input_shape']!r}, {facts['classes']}{text})"
    if method:  # the method's own network, with the user's in it
        line, call = _called(method.class_path, method.init_args)
        return f"{imports}{line}", f"{call}.build({network}, {facts['classes']})"
    return imports, network


def _called(class_path: str, arguments: dict[str, Any]) -> tuple[str, str]:
    """Return the line that imports a class, and the expression that makes an object of it."""
    module, _, name = class_path.rpartition(".")
    return (
        f"from {module} import {name}\n",
        f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})",
    )
