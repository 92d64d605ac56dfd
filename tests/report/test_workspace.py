import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from lines import run_line

from fl_lightning.callbacks.loggers import WandB
from fl_lightning.cli import main
from fl_lightning.foundation.metric import FURTHER
from fl_lightning.lab.report.workspace import SECTIONS

pytest.importorskip("wandb_workspaces", reason="the extra `dashboard` is not installed")
GOLDEN = Path(__file__).with_name("dashboard.json")
"""Written by: fl-train dashboard --json tests/report/dashboard.json"""


@pytest.mark.slow
def test_the_view_is_the_golden_one_every_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_line("dashboard --json view.json") == 0
    assert capsys.readouterr().out == "dashboard: view.json\n"
    assert (tmp_path / "view.json").read_text() == GOLDEN.read_text()


class Opened:
    """Stands in for an open W&B run, and holds the keys that it was given."""

    offline, dir, id, resumed = True, "wandb/x/files", "x", False

    def __init__(self):
        self.keys = set()
        self.summary = {}

    def log(self, row, step, commit):
        self.keys |= row.keys()

    def define_metric(self, *args, **kwargs): ...
    def log_artifact(self, artifact): ...
    def finish(self, exit_code): ...


@pytest.mark.slow
def test_every_panels_keys_are_logged_by_real_runs(fit, tmp_path, monkeypatch):
    """A relation, a global model with all metrics, and a privacy report: no method has all
    three."""
    opened = Opened()
    monkeypatch.setattr(WandB, "_open", lambda *_: opened)
    quick = "--federation.rounds 1 --loggers.wandb.mode offline"
    fit("kapc", quick, "--callbacks.heatmaps.every 1 --callbacks fixedrate")
    more = (
        f"--evaluation.metrics [{','.join(FURTHER)}] --data.global_test true "
        f"--data.held_out_clients 0.25"
    )
    fit("fedavg", quick, "--method fedavg", more)
    fit("fedhkd", quick, "--method fedhkd --method.sigma 1")
    logged = opened.keys | opened.summary.keys()
    asked = {
        key for panels in SECTIONS.values() for panel in panels for key in (*panel.keys, panel.x)
    }
    assert asked <= logged, asked - logged


# ---------------------------------------------------------------- a server of our own


@pytest.fixture
def server(tmp_path, monkeypatch):
    """W&B's server as far as views go, on the loopback; `views` by display name, `saved`: what was
    sent to it."""
    import wandb

    there = SimpleNamespace(views={}, saved=[], known=True)

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            out = (
                json.dumps({"data": answer(json.loads(body))}).encode()
                if self.path == "/graphql"
                else b"{}"
            )
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(out)))
            self.end_headers()
            self.wfile.write(out)

        def log_message(self, *args): ...

    def answer(asked):
        held = asked.get("variables") or {}
        if "upsertView" in asked["query"]:
            there.saved.append(held)
            node = {key: held[key] for key in ("name", "displayName", "spec")} | {"id": "the id"}
            there.views[held["displayName"]] = node
            return {"upsertView": {"view": node, "inserted": True}}
        if "allViews" in asked["query"]:
            edges = [{"node": node} for node in there.views.values()]
            return {"project": {"allViews": {"edges": edges}} if there.known else None}
        return {
            "viewer": {
                "id": "x",
                "entity": "me",
                "username": "me",
                "flags": "{}",
                "teams": {"edges": []},
            }
        }

    wandb.teardown()
    web = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    for name in ("WANDB_MODE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{web.server_address[1]}")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2 + "01234567")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    yield there
    wandb.teardown()
    web.shutdown()
    web.server_close()


@pytest.mark.slow
def test_the_view_is_saved_once_and_again_only_where_it_differs(server, capsys):
    for said in ("saved", "unchanged"):
        assert main(["dashboard"]) == 0
        assert re.fullmatch(
            rf"dashboard: http://127\.0\.0\.1:\d+/me/fl_lightning\?nw=\w+ "
            rf"\({said}\)\n",
            capsys.readouterr().out,
        )
    (first,) = server.saved
    assert (first["entityName"], first["projectName"], first["displayName"]) == (
        "me",
        "fl_lightning",
        "fl_lightning",
    )
    assert json.loads(first["spec"]) == json.loads(GOLDEN.read_text())["spec"]
    node = server.views["fl_lightning"]
    node["spec"] = node["spec"].replace("Machine", "Engine")  # somebody has changed it
    assert main(["dashboard"]) == 0
    assert (server.saved[1]["id"], server.saved[1]["name"]) == ("the id", first["name"])
    assert server.saved[1]["spec"] == first["spec"]
    capsys.readouterr()
    server.known = False
    assert run_line("dashboard --project other") == 2
    assert "project='me/other': W&B has no such project yet" in capsys.readouterr().err
