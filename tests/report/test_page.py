import json
from html.parser import HTMLParser

from fl_lightning.lab.report.page import render
from fl_lightning.results.runs import load


class Page(HTMLParser):
    """What a page is made of: tags with their attributes, text outside of scripts, the scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.scripts = []
        self.text = ""
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data

    @property
    def data(self):
        return json.loads(self.scripts[0])


def test_the_page_asks_for_nothing_from_outside(make_run):
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


def test_names_from_a_run_folder_are_harmless(make_run):
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


def test_nothing_but_strict_json_is_in_the_page(make_run):
    path = make_run()
    text = (path / "metrics.csv").read_text()
    (path / "metrics.csv").write_text(text.replace("0.5,", "nan,"))
    data = Page(render(load([path]))).scripts[0]
    assert "NaN" not in data
    json.loads(data)


def test_a_page_says_nothing_of_where_it_was_made(make_run, tmp_path):
    assert str(tmp_path) not in render(load([make_run()]))
