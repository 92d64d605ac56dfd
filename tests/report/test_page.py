from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from fl_lightning.lab.report.page import MARKER, render
from fl_lightning.results.runs import load

from .conftest import MakeRun


class Page(HTMLParser):
    """What a page is made of: tags with their attributes, text outside of scripts, the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data

    @property
    def data(self) -> dict[str, object]:
        return json.loads(self.scripts[0])


def test_the_page_asks_for_nothing_from_outside(make_run: MakeRun) -> None:
    page = Page(render(load([make_run()])))
    named = [
        value
        for _, attrs in page.tags
        for key, value in attrs.items()
        if key in ("src", "href", "action")
    ]
    assert named
    assert all(value and value.startswith("#") for value in named)
    assert "link" not in [tag for tag, _ in page.tags]
    (policy,) = [attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs]
    assert policy
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert len(page.scripts) == 2


def places(page: Page) -> set[str]:
    """Of charts."""
    return {
        str(attrs["id"])
        for tag, attrs in page.tags
        if tag in ("figure", "canvas") and "id" in attrs
    }


def test_a_place_for_every_chart(make_run: MakeRun) -> None:
    page = Page(render(load([make_run("a", channel=True), make_run("b", counted=False)])))
    assert places(page) == {
        *("accuracy", "accuracy-mib", "accuracy-channel", "accuracy-wall", "accuracy-kinds"),
        *("fairness-order", "overview-0", "overview-1", "client-0", "client-1"),
        *(f"ledger-{way}-{run}" for way in ("up", "down") for run in (0, 1)),
        *("ledger-bytes", "ledger-layers", "ledger-kinds"),
        *("cost-seconds", "cost-channel", "cost-flops"),
    }


def test_losses_have_a_place_before_any_round_is_judged(make_run: MakeRun) -> None:
    path = make_run("a", ended=False)
    (path / "metrics.csv").write_text("round,train_loss\n1,2.5\n2,1.5\n")
    page = Page(render(load([path])))
    assert "losses" in places(page) and "accuracy" not in places(page)
    assert "No round has been judged yet" in page.text


def test_names_from_a_run_folder_are_harmless(make_run: MakeRun) -> None:
    evil = "<script>alert(1)<"  # a slash cannot stand in a folder's name
    inside = "</script><script>alert(2)</script><b>"
    config = {"method": {"name": inside, "init_args": {inside: inside}}, "seed": inside}
    path = make_run(evil, config=config)
    summary = {"rounds": 3, "judge": inside, "version": inside, "final_mean_accuracy": inside}
    (path / "summary.json").write_text(json.dumps(summary))
    file = path / "traffic" / "round-0001.npz"
    import numpy as np

    with np.load(file) as held:
        np.savez(
            file,
            **{
                **held,
                "layers": np.array([inside, "b", "c"]),
                "kinds": np.array([inside, "b", "c", "d"]),
            },
        )
    text = render(load([path, make_run("b")]))
    page = Page(text)
    assert len(page.scripts) == 2
    assert [tag for tag, _ in page.tags].count("b") == 0
    assert "alert(2)" in page.text  # it is shown, as text
    assert evil in page.text
    assert "<script>alert" not in text


def test_nothing_but_strict_json_is_in_the_page(make_run: MakeRun) -> None:
    path = make_run()
    text = (path / "metrics.csv").read_text()
    (path / "metrics.csv").write_text(text.replace("0.5,", "nan,"))
    data = Page(render(load([path]))).scripts[0]
    assert "NaN" not in data
    json.loads(data)


def test_the_marker_is_near_the_top(make_run: MakeRun) -> None:
    assert MARKER in render(load([make_run()]))[:1000]


def test_a_page_says_nothing_of_where_it_was_made(make_run: MakeRun, tmp_path: Path) -> None:
    path = make_run(config={"seed": 0})
    assert yaml.safe_load((path / "config.yaml").read_text())["seed"] == 0
    assert str(tmp_path) not in render(load([path]))


@pytest.mark.parametrize("count", [1, 3, 12])
def test_any_number_of_runs(make_run: MakeRun, count: int) -> None:
    runs = load([make_run(f"run-{number}") for number in range(count)])
    page = render(runs)
    assert all(run.name in page for run in runs)
    assert ("runs side by side" in page) == (count > 1)
