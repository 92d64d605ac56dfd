"""The page in a real browser: Chromium without a screen, driven by ChromeDriver's HTTP interface
(W3C WebDriver)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning.lab.report import load, pictures, render

from .conftest import LAYERS, MakeRun

pytestmark = pytest.mark.slow

FLAGS = """
--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --window-size=1280,1000
"""
LEFT, SPACE = "\ue012", " "


class Browser:
    """One browser window."""

    def __init__(self, address: str, folder: Path) -> None:
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": [*FLAGS.split(), f"--user-data-dir={folder}"]},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        binary = shutil.which("chromium") or shutil.which("chromium-browser")
        if binary:
            wanted["goog:chromeOptions"]["binary"] = binary  # type: ignore[index]
        self.address = f"{address}/session"
        self.address += (
            "/" + self.ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        )

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send one WebDriver command; returns its value."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=60
        ) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self.ask("POST", "/url", {"url": page.as_uri()})

    def run(self, script: str) -> Any:
        """What JavaScript, ending in `return`, returns."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": []})

    def find(self, selector: str) -> str:
        found = self.ask("POST", "/element", {"using": "css selector", "value": selector})
        return f"/element/{next(iter(found.values()))}"

    def click(self, selector: str) -> None:
        self.ask("POST", f"{self.find(selector)}/click", {})

    def type(self, selector: str, keys: str) -> None:
        self.ask("POST", f"{self.find(selector)}/value", {"text": keys})

    def log(self, kind: str) -> list[dict[str, Any]]:
        return self.ask("POST", "/se/log", {"type": kind})

    def requests(self) -> set[str]:
        """Addresses that the page has asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return {
            e["params"]["request"]["url"]
            for e in events
            if e["method"] == "Network.requestWillBeSent"
        }


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None or not any(
        map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    ):
        pytest.skip("no browser: chromium and chromedriver are not installed")
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = next(
            found
            for line in process.stdout
            if (found := re.search(r"successfully on port (\d+)", line))
        )
        try:
            window = Browser(
                f"http://127.0.0.1:{port.group(1)}", tmp_path_factory.mktemp("profile")
            )
            yield window
            window.ask("DELETE", "")
        finally:
            process.terminate()


@pytest.fixture
def opened(browser: Browser, make_run: MakeRun, tmp_path: Path) -> Callable[..., Browser]:
    """Opens the report on runs; its console must have stayed silent, and nothing but the page been
    asked for."""

    def make(*runs: Path) -> Browser:
        page = tmp_path / "report.html"
        page.write_text(render(load(list(runs))), encoding="utf-8")
        browser.log("browser")
        browser.requests()
        browser.open(page)
        return browser

    return make


def check_quiet(browser: Browser) -> None:
    assert browser.log("browser") == []
    asked = browser.requests()
    # the browser's first tab is a page too
    own = ("file:", "data:", "blob:", "about:", "chrome:", "chrome-untrusted:")
    assert [url for url in asked if not url.startswith(own)] == []
    assert any(url.endswith("report.html") for url in asked)


def changing(path: Path) -> Path:
    """In round 2 clients 0 to 2 alone take part, and receive alike from each other."""
    file = path / "relation" / "round-0002.npz"
    clients = np.arange(3)
    rows = np.full((3, len(LAYERS), 3), 1 / 3, dtype=np.float32)
    np.savez(file, rows=rows, receivers=clients, layers=np.array(LAYERS), sources=clients)
    return path


PLOTS = (
    "return [...document.querySelectorAll('.plot')].map((div) => [div.id, "
    "div.querySelectorAll('.main-svg').length])"
)
MARKS = "return document.querySelectorAll('#%s .%s').length"


def test_every_chart_is_drawn(opened: Callable[..., Browser], make_run: MakeRun) -> None:
    browser = opened(make_run("a", channel=True), make_run("b"))
    plots = dict(browser.run(PLOTS))
    # curves, fairness, relation, ledger, its maps, cost
    assert len(plots) == 1 + 2 + 2 * 2 + 3 + 2 + 3
    assert all(plots.values()), plots
    assert browser.run(MARKS % ("curves", "scatterlayer .trace")) == 2
    assert browser.run(MARKS % ("fairness-box", "boxlayer .trace")) == 2
    assert browser.run(MARKS % ("overview-0", "heatmaplayer image")) == 1
    assert browser.run(MARKS % ("cost-seconds", "barlayer .trace")) == 3
    check_quiet(browser)


def test_the_slider_moves_the_heatmaps(opened: Callable[..., Browser], make_run: MakeRun) -> None:
    browser = opened(changing(make_run("a")))
    title = "return document.getElementById('overview-title-0').textContent"
    cells = "return document.getElementById('overview-0').data[0].z"
    assert browser.run(title) == "round 3, who receives from whom (mean over 3 layers)"
    before = browser.run(cells)
    assert np.diag(before) == pytest.approx(0.9, abs=1e-3)
    assert before[0][1] == pytest.approx(0.1 / 3, abs=1e-3)

    browser.type("#round", LEFT)  # a key is enough
    assert browser.run(title) == "round 2, who receives from whom (mean over 3 layers)"
    assert np.array(browser.run(cells)) == pytest.approx(1 / 3, abs=0.01)
    assert browser.run("return document.getElementById('overview-0').data[0].x") == ["0", "1", "2"]
    assert browser.run("return document.getElementById('round-number').textContent") == "2"

    browser.run(
        "const c = document.getElementById('client'); c.value = '3'; c.dispatchEvent(new "
        "Event('change'))"
    )
    of_client = "return document.getElementById('client-title-0').textContent"
    assert browser.run(of_client) == "round 2: client 3 is not in the cohort"
    browser.type("#round", LEFT)
    assert browser.run(of_client) == "round 1, what client 3 receives of each layer"
    rows = browser.run("return document.getElementById('client-0').data[0].z")
    assert np.array(rows)[:, 3] == pytest.approx(0.9, abs=1e-3)
    check_quiet(browser)


def test_a_client_of_the_cohort_without_details_is_not_said_to_be_absent(
    opened: Callable[..., Browser], make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Details of two of four: client 2 has none in rounds of all, and has in round 2 of clients 1
    to 3."""
    path = make_run("a")
    clients = np.arange(1, 4)
    rows = np.full((3, len(LAYERS), 3), 1 / 3, dtype=np.float32)
    file = path / "relation" / "round-0002.npz"
    np.savez(file, rows=rows, receivers=clients, layers=np.array(LAYERS), sources=clients)
    plan = pictures._plan
    monkeypatch.setattr(pictures, "_plan", lambda *given: (plan(*given)[0], {"a": 2}))
    browser = opened(path)
    browser.run(
        "const c = document.getElementById('client'); c.value = '2'; c.dispatchEvent(new "
        "Event('change'))"
    )
    of_client = "return document.getElementById('client-title-0').textContent"
    assert browser.run(of_client) == "round 3: client 2 is not shown layer by layer"
    browser.type("#round", LEFT)
    assert browser.run(of_client) == "round 2, what client 2 receives of each layer"
    check_quiet(browser)


def test_a_shorter_run_shows_its_last_round_and_says_so(
    opened: Callable[..., Browser], make_run: MakeRun
) -> None:
    browser = opened(make_run("a"), make_run("b", (0.1, 0.2)))
    title = "return document.getElementById('overview-title-1').textContent"
    deadline = time.monotonic() + 20
    # it is written once the charts are drawn
    while not browser.run(title) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (
        browser.run(title)
        == "round 2 (3 is not there), who receives from whom (mean over 3 layers)"
    )
    check_quiet(browser)


def test_play_runs_to_the_last_round_and_stops(
    opened: Callable[..., Browser], make_run: MakeRun
) -> None:
    browser = opened(make_run("a"))
    shown = "return document.getElementById('round-number').textContent"
    button = "return document.getElementById('play').textContent"
    browser.type("#play", SPACE)
    assert (browser.run(shown), "Pause" in browser.run(button)) == ("1", True)
    deadline = time.monotonic() + 20
    while browser.run(shown) != "3" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert browser.run(shown) == "3"
    assert "Play" in browser.run(button)
    check_quiet(browser)


def test_curves_against_another_axis_and_of_another_kind(
    opened: Callable[..., Browser], make_run: MakeRun
) -> None:
    browser = opened(make_run("a", channel=True), make_run("b"))
    drawn = (
        "const d = document.getElementById('curves'); return [d.layout.xaxis.title.text, "
        "d.data.map((t) => [t.x, t.y])]"
    )
    assert browser.run(drawn) == ["round", [[[1, 2, 3], [0.1, 0.5, 0.8]]] * 2]
    choose = (
        "const c = document.getElementById('curve-axis'); c.value = '%s'; c.dispatchEvent(new "
        "Event('change'))"
    )
    browser.run(choose % "mib")
    assert browser.run(drawn) == ["MiB sent", [[[8, 16, 24], [0.1, 0.5, 0.8]]] * 2]
    browser.run(choose % "channel")
    assert browser.run(drawn) == ["modelled channel seconds", [[[3, 6, 9], [0.1, 0.5, 0.8]]]]
    note = "return document.getElementById('curve-note').textContent"
    assert browser.run(note) == "Not measured in every round of b: modelled channel seconds."
    browser.click("#curve-kinds input[value=worst_accuracy]")
    assert browser.run(drawn)[1] == [[[3, 6, 9], [0.1, 0.5, 0.8]], [[3, 6, 9], [0.05, 0.25, 0.4]]]
    check_quiet(browser)


def test_what_is_folded_away_opens_as_wide_as_the_rest(
    opened: Callable[..., Browser], make_run: MakeRun
) -> None:
    path = make_run("a")
    for file in (path / "relation").iterdir():
        np.savez(
            file,
            **(
                dict(np.load(file))
                | {"rows": np.eye(4, dtype=np.float32)[:, None].repeat(3, axis=1)}
            ),
        )
    browser = opened(path, make_run("b"))
    width = "return document.querySelector('#overview-%d .main-svg').getBoundingClientRect().width"
    browser.click("#constant summary")
    time.sleep(0.5)
    assert (
        browser.run(width % 0)
        == browser.run("return document.getElementById('overview-0').clientWidth")
        > 300
    )
    check_quiet(browser)


def test_layers_sent_down_and_up(opened: Callable[..., Browser], make_run: MakeRun) -> None:
    browser = opened(make_run("a"))
    cells = "return document.getElementById('share-0').data[0].z.map((row) => row[0])"
    assert browser.run(cells) == [1, 0, 0]
    browser.run(
        "const c = document.getElementById('way'); c.value = 'down'; c.dispatchEvent(new "
        "Event('change'))"
    )
    assert browser.run(cells) == [1, 1, 1]
    assert browser.run("return document.getElementById('share-title-0').textContent") == "received"
    check_quiet(browser)


def test_a_run_called_script_runs_nothing(
    opened: Callable[..., Browser], make_run: MakeRun
) -> None:
    evil = "<img src=x onerror=window.evil=1><script>window.evil=1<"
    browser = opened(make_run(evil, config={"method": {"name": f"{evil}/script>"}}), make_run("b"))
    assert browser.run("return window.evil === undefined")
    assert browser.run("return document.title") == f"Report: {evil}, b"
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert evil[:10] in browser.run(
        "return document.querySelector('#curves .legendtext').textContent"
    )
    check_quiet(browser)


def test_what_is_missing_leaves_no_empty_chart(
    opened: Callable[..., Browser], make_run: MakeRun
) -> None:
    path = make_run("a")
    for name in ("metrics.csv", "clients.csv", "final.csv", "summary.json"):
        (path / name).unlink()
    for name in ("relation", "traffic"):
        shutil.rmtree(path / name)
    browser = opened(path)
    assert browser.run(PLOTS) == []
    check_quiet(browser)


def test_a_seed_without_a_judged_round_leaves_the_others_curve(
    opened: Callable[..., Browser], make_run: MakeRun
) -> None:
    paths = [make_run("a"), make_run("b", config={"seed": 1})]
    (paths[1] / "metrics.csv").write_text("round,train_loss\n1,2.5\n")
    browser = opened(*paths)
    names = "return document.getElementById('%s').data.map((trace) => [trace.name, trace.y])"
    assert browser.run(names % "curves") == [["a", [0.1, 0.5, 0.8]]]
    assert browser.run(names % "losses") == [["b · loss", [2.5]]]
    assert browser.run("return document.getElementById('curve-note').textContent") == ""
    check_quiet(browser)
    browser = opened(paths[1])
    assert dict(browser.run(PLOTS))["losses"]
    assert all(dict(browser.run(PLOTS)).values())
    check_quiet(browser)


@pytest.mark.parametrize("width", [380, 800, 1400])
def test_nothing_is_wider_than_the_window(
    opened: Callable[..., Browser], make_run: MakeRun, width: int
) -> None:
    browser = opened(make_run("a" * 60), make_run("b"))
    browser.ask(
        "POST",
        "/goog/cdp/execute",
        {
            "cmd": "Emulation.setDeviceMetricsOverride",
            "params": {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        },
    )
    time.sleep(0.5)  # charts follow the window
    assert browser.run("return document.documentElement.scrollWidth") <= width
    taller = "p.scrollHeight > p.clientHeight + 1"  # what follows a chart would lie over it
    assert (
        browser.run(
            f"return [...document.querySelectorAll('.plot')].filter((p) => {taller}).length"
        )
        == 0
    )
    browser.ask(
        "POST", "/goog/cdp/execute", {"cmd": "Emulation.clearDeviceMetricsOverride", "params": {}}
    )


def test_many_names_leave_room_on_a_narrow_screen(
    opened: Callable[..., Browser], make_run: MakeRun
) -> None:
    """Twelve names, a line each, once took all but 70 pixels."""
    metrics = {"cmd": "Emulation.setDeviceMetricsOverride"}
    narrow = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser = opened(*(make_run(f"run-{k}") for k in range(6)))
    browser.ask("POST", "/goog/cdp/execute", {**metrics, "params": narrow})
    browser.ask("POST", "/refresh", {})
    time.sleep(0.5)
    for chart in ("ledger-bytes", "curves"):
        room = f"return document.querySelector('#{chart} .nsewdrag').getBoundingClientRect().height"
        assert browser.run(room) > 180, chart
    browser.ask(
        "POST", "/goog/cdp/execute", {"cmd": "Emulation.clearDeviceMetricsOverride", "params": {}}
    )
