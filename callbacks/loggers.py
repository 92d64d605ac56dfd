"""Loggers beside the run folder: each passes a round's metrics and pictures on to a viewer. Rank 0 alone speaks."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import numpy as np

from fl_lightning.callbacks.base import Observer
from fl_lightning.config import check
from fl_lightning.core.run import Run
from fl_lightning.errors import SECRET, RunFailed
from fl_lightning.files import atomic_write
from fl_lightning.metric import BY_TASK, FURTHER
from fl_lightning.record import RoundRecord
from fl_lightning.runfolder import RunFolder

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard import SummaryWriter

_Mode = Literal["online", "offline", "disabled"]
_OF_JUDGE = tuple(
    metric.of(f"{part}{what}")
    for metric in BY_TASK.values()
    for part in ("", "best_", "last_", "final_", "validation_")
    for what in ("mean", "worst", "std", "weighted", "validation", "mean_best")
) + tuple(metric.of(f"{part}{what}") for metric in FURTHER.values() for part in ("", "final_")
          for what in ("mean", "clients"))  # fmt: skip
"""Columns and keys that speak of the judge's kind of model, whichever that is."""
_PATIENCE = 3.0  # seconds to wait for a sign of life of the W&B server


def by_judge(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, in which whatever a run's own judge says is named `own_judge/...`.

    A viewer draws what has one name into one picture, and runs have different judges: they are to be compared by
    `accuracy_after` and its like, which speak of one kind of model in all runs.
    """
    return {f"own_judge/{name}" if name in _OF_JUDGE else name: value for name, value in values.items()}


class TensorBoard(Observer):
    """Scalars and pictures for TensorBoard, in `tensorboard/` of the run folder; the step is the round."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def on_fit_start(self, run: Run) -> None:
        """Open the event file; events of rounds that will be run again are hidden from now on."""
        if run.is_main:
            from torch.utils.tensorboard import SummaryWriter

            folder = run.folder / "tensorboard"
            again = run.resumed_from + 1 if folder.exists() else None  # also before a first checkpoint
            self._writer = SummaryWriter(str(folder), purge_step=again)

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Write the round, and see to it that a reader finds it."""
        if self._writer is None:
            return
        for name, value in by_judge(record.metrics).items():
            self._writer.add_scalar(name, value, record.round)
        for name, image in record.images.items():
            self._writer.add_image(name, image, record.round, dataformats="HWC")
        self._writer.flush()

    def on_close(self, run: Run) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB(Observer):
    """Metrics and heatmaps for Weights & Biases; without a key or a network, a folder to upload later.

    A round is one row of the history, its axis is `round`. `wandb_id.txt` in the run folder lets a resumed run go on
    under the same id; rounds that W&B has not got (an offline run cannot be appended to) are sent again from
    `metrics.csv` and `figures/`.
    """

    def __init__(
        self,
        project: str = "fl_lightning",
        entity: str | None = None,
        mode: Literal["auto", "online", "offline", "disabled"] = "auto",
        group: str | None = None,
        tags: list[str] | None = None,
    ) -> None:
        """`mode` auto: online where an API key is known and the server answers, else offline; WANDB_MODE is heeded."""
        modes = ("auto", "online", "offline", "disabled")
        check("loggers.wandb.mode", mode, mode in modes, f"it must be one of {', '.join(modes)}")
        self.project, self.entity, self.mode, self.group, self.tags = project, entity, mode, group, tags
        self._run: wandb.Run | None = None
        self._sent = 0  # the last round that W&B has
        self._ended = False

    def on_fit_start(self, run: Run) -> None:
        """Decide between online and offline, and open the run. Raises `BadInput` if `online` cannot be."""
        if not run.is_main or self.mode == "disabled":
            return
        offline: tuple[_Mode, str] = ("offline", "")
        mode, reason = offline if self.mode == "offline" else _possible_mode()
        check("loggers.wandb.mode", self.mode, self.mode in ("auto", mode), f"{reason}; use auto or offline")
        if mode == "disabled":
            return
        for attempt in dict.fromkeys((mode, "offline")):
            try:
                self._run = self._open(run, attempt)
                break
            except Exception as error:  # its text stays unsaid: it may hold parts of the key
                reason = f"opening an {attempt} run failed ({type(error).__name__})"
                if self.mode != "auto":
                    raise RunFailed(f"W&B: {reason}") from None
        if self._run is None:
            self._say(f"nothing is logged, since {reason}")
            return
        if self._run.offline:
            self._say(f"offline{reason and f', since {reason}'}; upload later with: {self._where()}")
        else:
            self._say(self._where())
            self._sent = int(self._run.summary.get("round", 0)) if self._run.resumed else 0
        self._send_again(run.folder)

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Send the round as one row."""
        self._send(record.round, record.metrics, record.images)

    def on_fit_end(self, run: Run, summary: dict[str, Any]) -> None:
        """Set the run's summary, and leave the way to it under `wandb` in ours."""
        self._ended = True
        if self._run is not None:
            scalars = {k: v for k, v in summary.items() if isinstance(v, (bool, int, float, str))}
            self._run.summary.update(by_judge(scalars))
            summary["wandb"] = self._where()

    def on_close(self, run: Run) -> None:
        """Finish the run; what cannot be uploaded in a minute stays on the disk."""
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=0 if self._ended else 1)
        except Exception as error:
            self._say(f"not all is uploaded ({type(error).__name__}); upload it with: {self._sync()}")
            _let_go()
        self._run = None

    def _open(self, run: Run, mode: _Mode) -> wandb.Run:
        import wandb

        id_file = run.folder / "wandb_id.txt"
        known = id_file.read_text().strip() if run.resumed_from and id_file.exists() else None
        opened = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group,
            tags=self.tags,
            name=run.folder.name,
            dir=run.folder,
            id=known,
            resume="allow" if known and mode == "online" else None,
            mode=mode,
            config=_without_secrets(run.config.to_dict()),
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=30, finish_timeout=60, finish_timeout_raises=True
            ),
        )
        with atomic_write(id_file) as aside:
            aside.write_text(f"{opened.id}\n")
        opened.define_metric("round")
        opened.define_metric("*", step_metric="round")
        return opened

    def _send_again(self, folder: Path) -> None:
        """Send the finished rounds that W&B does not have."""
        for row in RunFolder(folder).read_metrics():
            round = int(row.pop("round"))
            prefix = f"round-{round:04d}-"
            files = sorted((folder / "figures").glob(f"{prefix}*.png"))
            self._send(round, row, {f"relation/{file.stem.removeprefix(prefix)}": file for file in files})

    def _send(self, round: int, metrics: dict[str, float], images: dict[str, np.ndarray] | dict[str, Path]) -> None:
        if self._run is None or round <= self._sent:
            return
        import wandb

        try:
            self._run.log(
                {"round": round, **by_judge(metrics), **{name: wandb.Image(image) for name, image in images.items()}}
            )
        except Exception as error:  # a viewer that is lost must not stop the training
            self._say(f"logging stopped in round {round} ({type(error).__name__}); all of it is in metrics.csv")
            self._run = None
            _let_go()
        self._sent = round

    def _where(self) -> str:
        assert self._run is not None
        return self._sync() if self._run.offline else str(self._run.url)

    def _sync(self) -> str:
        assert self._run is not None
        return f"wandb sync {Path(self._run.dir).parent}"

    def _say(self, line: str) -> None:
        print(f"W&B: {line}", file=sys.stderr, flush=True)


def _let_go() -> None:
    """Part with a helper of W&B's that is gone, or W&B prints a traceback when the process ends."""
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown(exit_code=1)


def _possible_mode() -> tuple[_Mode, str]:
    """What `auto` comes to (online, offline or disabled), and why it is not online. Never asks for a key."""
    import wandb

    try:
        settings = wandb.setup(wandb.Settings(silent=True)).settings
        if settings.mode in ("disabled", "offline", "dryrun"):
            return "disabled" if settings.mode == "disabled" else "offline", f"W&B is set to {settings.mode}"
        if not wandb.login(prompt=False, verify=False):
            return "offline", "no API key is known (set WANDB_API_KEY, or run: wandb login)"
    except Exception as error:
        return "offline", f"the W&B settings or the API key cannot be used ({type(error).__name__})"
    host, port = _address(settings.base_url)
    if not _answers(host, port):
        return "offline", f"{host} does not answer"
    return "online", ""


def _address(url: str) -> tuple[str, int]:
    """Host and port that a request for `url` goes to: the proxy's, where there is one."""
    asked = urlsplit(url)
    proxy = urllib.request.getproxies().get(asked.scheme)
    if proxy and not urllib.request.proxy_bypass(asked.hostname or ""):
        asked = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return asked.hostname or "", asked.port or (80 if asked.scheme == "http" else 443)


def _answers(host: str, port: int) -> bool:
    """Whether something listens there. A thread, since looking a name up heeds no time limit."""
    answered = threading.Event()

    def knock() -> None:
        try:
            socket.create_connection((host, port), _PATIENCE).close()
            answered.set()
        except OSError:
            pass

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return answered.is_set()


def _without_secrets(value: Any) -> Any:
    """`value` with the texts under keys such as `password` or `api_key` starred out."""
    if isinstance(value, dict):
        return {k: "***" if isinstance(v, str) and SECRET.search(k) else _without_secrets(v) for k, v in value.items()}
    return [_without_secrets(item) for item in value] if isinstance(value, list) else value
