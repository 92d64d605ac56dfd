"""`fl-train dashboard`: the project's workspace at W&B, or the same as a file."""

from __future__ import annotations

import json

from fl_lightning.cli.folder import check_out
from fl_lightning.cli.settings import read_line
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.files import write_whole

VIEW_MARK = '"type": "project-view"'
"""Near the beginning of each view that is kept as a file."""


def dashboard(argv: list[str]) -> None:
    """Save the workspace at W&B where it has changed, or write it (`--json`) to a file."""
    values = read_line(argv, "dashboard").values
    from fl_lightning.lab.report import workspace

    if values.json is not None:
        file = check_out("json", values.json, "", VIEW_MARK, "view of W&B")
        view = workspace.view(values.entity or "", values.project, values.name)
        write_whole(file, json.dumps(view, indent=1) + "\n", durable=False)
        print(f"dashboard: {values.json}")
        return
    try:
        where, saved = workspace.save(values.entity, values.project, values.name)
    except BadInput:
        raise
    except Exception as error:  # its text stays unsaid: it may hold parts of the key
        raise RunFailed(
            f"W&B: the view could not be saved ({type(error).__name__}); see --json FILE"
        ) from None
    print(f"dashboard: {where} ({'saved' if saved else 'unchanged'})")
