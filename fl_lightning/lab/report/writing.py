"""Write the page on runs or on a study."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fl_lightning.configuration.config import check
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.files import write_whole
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.results.opening import check_out, check_path


def report(
    folders: Sequence[str],
    out: str | None,
    figures: Literal["svg", "pdf", "png"] | None,
    accept_changed_code: bool,
) -> str:
    """Write one page, and with `figures` also a file for each chart.

    Args:
        folders: run folders, folders of runs, or the folder of one study.
        out: path of the page; None: report.html, in the folder if there is only one.
        figures: format of the charts' files; None: no files.
        accept_changed_code: for a study, as in `compare`.

    Returns:
        Lines with the paths of the page and of the folder of charts.

    Raises:
        BadInput: a folder does not exist or has no run; or a file with the name of the page or of a
            chart exists that no report has written, and so must not be overwritten.
    """
    check(
        "run",
        None,
        bool(folders),
        "it must be given: fl-train report RUN [RUN ...]",
    )
    for folder in folders:
        check_path("run", Path(folder))
    is_single = len(folders) == 1
    page = out
    if page is None:
        page = os.fspath(Path(folders[0] if is_single else ".") / "report.html")
    study = StudyFolder(Path(folders[0]))
    # for a regression, a study has no comparison: show its runs
    if study and is_single and not study.is_regression():
        from fl_lightning.lab.study.comparison import report as report_study

        charts = report_study(
            folders[0],
            page,
            figures,
            accept_changed_code,
        )
        return _where(Path(page), charts)
    require("report", "report", folders[0])
    from fl_lightning.lab.report import figures as drawing
    from fl_lightning.lab.report import vector
    from fl_lightning.lab.report.page import MARKER, render
    from fl_lightning.results.runs import load, run_folders

    runs = load(run_folders([Path(folder) for folder in folders]))
    file = check_out(
        "out",
        page,
        ".html",
        MARKER,
        "report",
    )
    text, charts = render(runs), None
    if figures is not None:
        charts = file.with_name(f"{file.stem}-figures")
        vector.write(
            drawing.draw(runs) | drawing.relation_heatmaps(runs),
            charts,
            figures,
        )
    write_whole(file, text)
    return _where(file, charts)


def _where(page: Path, charts: Path | None) -> str:
    return f"report: {page}" + ("" if charts is None else f"\nfigures: {charts}")
