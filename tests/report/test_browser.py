"""The page in a real browser: Chromium without a screen, driven by ChromeDriver's HTTP interface
(W3C WebDriver)."""

import json
import re
import shutil
import subprocess
import time
import urllib.request

import numpy as np
import pytest

from fl_lightning.lab.report.page import render
from fl_lightning.results.runs import load

from .conftest import LAYERS

pytestmark = pytest.mark.slow

FLAGS = """
--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --window-size=1280,1000
"""
LEFT, SPACE = "\ue012", " "


class Browser:
    """One browser window."""

    def __init__(self, address, folder):
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

    def ask(self, method, path, body=None):
        """Send one WebDriver command; returns its value."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=60
        ) as answer:
            return json.load(answer)["value"]

    def open(self, page):
        self.ask("POST", "/url", {"url": page.as_uri()})

    def run(self, script):
        """What JavaScript, ending in `return`, returns."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": []})

    def find(self, selector):
        found = self.ask("POST", "/element", {"using": "css selector", "value": selector})
        return f"/element/{next(iter(found.values()))}"

    def click(self, selector):
        self.ask("POST", f"{self.find(selector)}/click", {})

    def type(self, selector, keys):
        self.ask("POST", f"{self.find(selector)}/value", {"text": keys})

    def log(self, kind):
        return self.ask("POST", "/se/log", {"type": kind})

    def requests(self):
        """Addresses that the page has asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return {
            e["params"]["request"]["url"]
            for e in events
            if e["method"] == "Network.requestWillBeSent"
        }


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
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
def opened(browser, make_run, tmp_path):
    """Opens the report on runs; its console must have stayed silent, and nothing but the page been
    asked for."""

    def make(*runs):
        page = tmp_path / "report.html"
        page.write_text(render(load(list(runs))), encoding="utf-8")
        browser.log("browser")
        browser.requests()
        browser.open(page)
        return browser

    return make


def check_quiet(browser):
    assert browser.log("browser") == []
    asked = browser.requests()
    # the browser's first tab is a page too
    own = ("file:", "data:", "blob:", "about:", "chrome:", "chrome-untrusted:")
    assert [url for url in asked if not url.startswith(own)] == []
    assert any(url.endswith("report.html") for url in asked)


def changing(path):
    """In round 2 clients 0 to 2 alone take part, and receive alike from each other."""
    file = path / "relation" / "round-0002.npz"
    clients = np.arange(3)
    rows = np.full((3, len(LAYERS), 3), 1 / 3, dtype=np.float32)
    np.savez(file, rows=rows, receivers=clients, layers=np.array(LAYERS), sources=clients)
    return path


CHOOSE = (
    "const c = document.getElementById('%s'); c.value = '%s'; c.dispatchEvent(new Event('change'))"
)
TEXT = "return document.getElementById('%s').textContent"


def pixels(browser, canvas):
    """How many colours a canvas shows."""
    return browser.run(
        f"const c = document.getElementById('{canvas}');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "return new Set(new Uint32Array(d.buffer)).size"
    )


def hover(browser, canvas, x, y):
    """The words for the cell at these shares of a canvas's width and height."""
    return browser.run(
        f"const c = document.getElementById('{canvas}'), b = c.getBoundingClientRect();"
        f"c.onmousemove({{offsetX: b.width * {x}, offsetY: b.height * {y}}});"
        f"return document.getElementById('{canvas.replace('-', '-note-')}').textContent"
    )


def test_every_chart_is_drawn(opened, make_run):
    browser = opened(make_run("a", channel=True), make_run("b"))
    sizes = browser.run(
        "return [...document.querySelectorAll('section > figure > svg, .grid svg')]"
        ".map((svg) => svg.getBoundingClientRect().height)"
    )
    assert len(sizes) >= 12 and min(sizes) > 100
    assert all(
        pixels(browser, f"{kind}-{run}") > 4 for kind in ("overview", "client") for run in (0, 1)
    )
    check_quiet(browser)


def test_the_slider_moves_the_heatmaps(opened, make_run):
    browser = opened(changing(make_run("a")))
    assert (
        browser.run(TEXT % "overview-title-0")
        == "round 3, who receives from whom (mean over 3 layers)"
    )
    assert hover(browser, "overview-0", 0.15, 0.05) == "client 0 receives from client 0: weight 0.9"
    assert "from client 1: weight 0.033" in hover(browser, "overview-0", 0.4, 0.05)

    browser.type("#round", LEFT)  # a key is enough
    assert browser.run(TEXT % "overview-title-0").startswith("round 2, who receives from whom")
    assert "weight 0.33" in hover(browser, "overview-0", 0.15, 0.05)
    assert browser.run(TEXT % "round-number") == "2"

    browser.run(CHOOSE % ("client", "3"))
    assert browser.run(TEXT % "client-title-0") == "round 2: client 3 is not in the cohort"
    browser.type("#round", LEFT)
    assert browser.run(TEXT % "client-title-0") == "round 1, what client 3 receives of each layer"
    assert hover(browser, "client-0", 0.8, 0.1) == "layer conv of client 3: weight 0.9"
    check_quiet(browser)


@pytest.mark.parametrize("width", [380, 800, 1400])
def test_nothing_is_wider_than_the_window(opened, make_run, width):
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
    browser.ask(
        "POST", "/goog/cdp/execute", {"cmd": "Emulation.clearDeviceMetricsOverride", "params": {}}
    )
