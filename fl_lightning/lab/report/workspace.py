"""Make a W&B workspace for a project: a saved view with panels for what runs log. Equal panels give
equal bytes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.files import write_whole
from fl_lightning.foundation.metric import FURTHER
from fl_lightning.results.columns import viewer_name
from fl_lightning.results.opening import check_out

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

VIEW_MARK = '"type": "project-view"'
"""Text near the beginning of a file with a view, which may be overwritten."""
VIEW = "fl_lightning"
"""Default name of the view."""
_BANDS = {
    "groupby": "Group",
    "groupby_aggfunc": "mean",
    "groupby_rangefunc": "stddev",
}
"""Settings of curves and bars over runs of a group, which differ in their seed: their mean, with
one standard deviation on either side."""
_NEWCOMERS = tuple(f"newcomers/newcomer_mean_accuracy_{count}" for count in (0, 1, 5, 20))
_JUDGE, _ROUND = "accuracy/own_judge_mean", "round"
_VIEWS = """query Views($entity: String, $project: String) {
    project(name: $project, entityName: $entity) {
        allViews(viewType: "project-view") { edges { node { id name displayName spec } } }
    }
}"""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Args:
        title: its title.
        keys: logged keys that it draws.
        kind: "curve" (over the key `x`), "bars", "table" or "pictures".
        x: logged key of a curve's x axis.
    """

    title: str
    keys: tuple[str, ...]
    kind: str = "curve"
    x: str = _ROUND


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Who receives from whom": (
        Panel(
            "Who receives from whom, by round and run",
            ("relation/overview",),
            "pictures",
        ),
        Panel(
            "What single clients receive, layer by layer",
            ("relation/client-000", "relation/client-001"),
            "pictures",
        ),
        Panel("Who holds which classes", ("data/split",), "pictures"),
        Panel("Every weight", ("relation/cube",), "table"),
    ),
    "Accuracy": (
        Panel("By each run's own judge", (_JUDGE,)),
        Panel("Before local training", ("accuracy/before",)),
        Panel("After local training", ("accuracy/after",)),
        Panel("Global model", ("accuracy/global",)),
        Panel(
            "Worst tenth of the clients, by each run's own judge",
            ("fairness/own_judge_worst_accuracy",),
        ),
        Panel(
            "Spread over clients (std), by each run's own judge",
            ("fairness/own_judge_std_accuracy",),
        ),
        Panel("Clients at the end", ("clients/final",), "table"),
    ),
    "Further metrics, where evaluation.metrics asks for them": tuple(
        Panel(
            f"{metric.words[:1].upper()}{metric.words[1:]}, by each run's own judge",
            (viewer_name(metric.of("mean")),),
        )
        for metric in FURTHER.values()
    ),
    "Unseen clients, where data.held_out_clients holds some out": (
        Panel(
            "Accuracy by labelled samples of each class",
            _NEWCOMERS,
            "bars",
        ),
    ),
    "Bytes and time to accuracy": (
        Panel(
            "Accuracy over MiB, up and down",
            (_JUDGE,),
            x="communication/mib_so_far",
        ),
        Panel("Accuracy over seconds", (_JUDGE,), x="cost/seconds_so_far"),
        Panel(
            "Accuracy over the channel's seconds",
            (_JUDGE,),
            x="communication/channel_s_so_far",
        ),
        Panel("Bytes in a round", ("communication/upload_bytes", "communication/download_bytes")),
    ),
    "Privacy": (
        Panel("Epsilon of the run", ("privacy/epsilon",), "bars"),
        Panel(
            "Epsilon of a round",
            ("privacy/privacy_epsilon_round",),
            "bars",
        ),
    ),
    "Machine": (
        Panel("Seconds of a round", ("cost/seconds", "cost/seconds_client", "cost/seconds_server")),
        Panel("Seconds of scoring", ("cost/seconds_evaluation",)),
        Panel("Memory, MiB", ("cost/memory_mib", "cost/memory_server_mib")),
        Panel("Operations of clients", ("cost/flops_forward", "cost/flops_backward")),
    ),
}
"""Panels of the workspace, by title of their section."""


def view(
    entity: str,
    project: str,
    name: str = VIEW,
) -> dict[str, Any]:
    """Build the view as W&B stores it: `displayName`, `entity`, `project`, `type` and `spec`; works
    offline.

    Raises:
        BadInput: the package wandb-workspaces is not installed.
    """
    return {
        "displayName": name,
        "entity": entity,
        "project": project,
        "type": "project-view",
        "spec": _spec(_workspace(entity, project, name)),
    }


def _spec(workspace: Workspace) -> Any:
    """Specification of a workspace's panels, as W&B stores it."""
    spec = workspace._to_model().spec
    return spec.model_dump(by_alias=True, exclude_none=True, mode="json")


def save(
    entity: str | None,
    project: str,
    name: str = VIEW,
) -> tuple[str, bool]:
    """Save the view at W&B, unless the same view is there already.

    Args:
        entity: W&B entity; None: the user's default.
        project: W&B project, which must exist.
        name: name of the view.

    Returns:
        The address of the view, and whether it was saved.

    Raises:
        BadInput: W&B has no such project, or wandb-workspaces is not installed.
    """
    import wandb

    workspace = _workspace(entity or "", project, name)
    from wandb_workspaces._graphql import execute_graphql

    api = wandb.Api()
    workspace.entity = entity or api.default_entity or ""
    answer = execute_graphql(
        api,
        _VIEWS,
        {
            "entity": workspace.entity,
            "project": project,
        },
    ).get("project")
    if answer is None:
        raise BadInput(
            "project",
            f"{workspace.entity}/{project}",
            "W&B has no such project yet; log a run to it first",
        )
    nodes = [edge["node"] for edge in answer["allViews"]["edges"]]
    saved = next((node for node in nodes if node["displayName"] == name), None)
    if saved is not None:
        workspace._internal_id, workspace._internal_name = saved["id"], saved["name"]
        if json.loads(saved["spec"]) == _spec(workspace):
            return workspace.url, False
    wandb.termlog, termlog = (lambda *_, **__: None), wandb.termlog
    try:
        workspace.save()
    finally:
        wandb.termlog = termlog
    return workspace.url, True


def _workspace(
    entity: str,
    project: str,
    name: str,
) -> Workspace:
    require("dashboard", "dashboard", name)
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces
    from wandb_workspaces.expr import Metric

    panels: Any = reports  # its names are made on import, unknown to type checkers

    def drawn(panel: Panel) -> Any:
        kinds: dict[str, Any] = {
            "curve": lambda: panels.LinePlot(
                title=panel.title, x=panel.x, y=[*panel.keys], **_BANDS
            ),
            "bars": lambda: panels.BarPlot(
                title=panel.title,
                metrics=[*panel.keys],
                **_BANDS,
            ),
            "table": lambda: panels.WeavePanelSummaryTable(table_name=panel.keys[0]),
            "pictures": lambda: panels.MediaBrowser(
                title=panel.title,
                media_keys=[*panel.keys],
                mode="grid",
                grid_x_axis="step",
                grid_y_axis="run",
            ),
        }
        drawn_panel = kinds[panel.kind]()
        # by default it is random
        drawn_panel._id = hashlib.blake2b(panel.title.encode(), digest_size=6).hexdigest()
        return drawn_panel

    sections = [
        workspaces.Section(
            name=title,
            panels=[drawn(panel) for panel in contents],
            is_open=True,
        )
        for title, contents in SECTIONS.items()
    ]
    columns = [
        "run:displayName",
        "config:method.name",
        "config:seed",
        f"summary:{_JUDGE}.max",
        f"summary:{_JUDGE}.last",
    ]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis=_ROUND, max_runs=50),
        runset_settings=workspaces.RunsetSettings(
            groupby=[Metric("Group")], pinned_columns=columns
        ),
    )


def dashboard(
    entity: str | None,
    project: str,
    name: str,
    file: str | None,
) -> str:
    """Save the workspace at W&B if it has changed, or write it to a file.

    Args:
        entity: W&B entity; None: the user's default.
        project: W&B project.
        name: name of the view.
        file: path of the file; None: save at W&B.

    Returns:
        A line with the file or the address.

    Raises:
        RunFailed: W&B cannot be reached, or refuses the view.
    """
    if file is not None:
        path = check_out(
            "json",
            file,
            "",
            VIEW_MARK,
            "view of W&B",
        )
        text = json.dumps(view(entity or "", project, name), indent=1) + "\n"
        write_whole(path, text, durable=False)
        return f"dashboard: {file}"
    try:
        where, is_new = save(entity, project, name)
    except BadInput:
        raise
    except Exception as error:  # its text is not shown: it may contain parts of the API key
        raise RunFailed(
            f"W&B: the view could not be saved ({type(error).__name__}); write it to --json FILE"
        ) from None
    return f"dashboard: {where} ({'saved' if is_new else 'unchanged'})"
