"""`fl-train reproduce`, the studies that ship with the package, and what of a run stands beside a
paper's number."""

import csv
import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from refusals import refused_line, refuses
from scipy import stats

from fl_lightning.configuration.catalogue import table
from fl_lightning.foundation.csvtable import CsvTable
from fl_lightning.lab.study import listing, papers, studyfile
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import Study
from fl_lightning.lab.study.papers import OurNumber, cells_of, reason_for
from fl_lightning.lab.study.reproduce import (
    AGREES,
    DIFFERS,
    NOT_RUN,
    ONE,
    OPEN,
    compare_with_paper,
    number_of_run,
    verdict_on,
)
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.result import RunResult

from .small import SMALL

ALPHA = "10 clients; participation 1.0; 10% of data; Dirichlet alpha=0.1"
METRIC = "best_mean_accuracy_percent"
PAPER = {
    "title": "A table",
    "tables": ["kapc_aaai_table1", "kapc_bls_table1"],
    "where": {"dataset": "MNIST"},
    "runs": 3,
    "settings": {ALPHA: {"data.alpha": 0.1}},
    "figures": {METRIC: {"figure": "best", "kind": "after"}},
    "rows": {
        "local": {"label": "local", "figure": "last"},
        "KAPC": "kapc",
        "FedBN": {"absent": "it has none"},
        "FedProto": {"label": "local", "kind": "global"},
    },
}
TINY = {
    "base": [
        "kapc_exact_digits",
        {**SMALL, "federation.clients": 3},
    ],
    "methods": ["kapc", "local"],
    "seeds": [0, 1],
    "grid": {"data.alpha": [0.1]},
    "forced": False,
    "paper": PAPER,
}


# ---------------------------------------------------------------- what ships


@pytest.fixture(scope="module")
def cells_by_study():
    """The cells of every shipped study that has a paper."""
    studies = {name: Study.of(studyfile.read(name)) for name in table("studies")}
    assert min(len(study.seeds) for study in studies.values()) >= 3
    return {name: cells_of(study) for name, study in studies.items() if study.paper}


@pytest.mark.slow
def test_shipped_studies_are_whole(cells_by_study):
    """Each can be read and stands for cells of a paper; the methods that it has not are told."""
    for name, cells in cells_by_study.items():
        assert len(cells) >= 8, name
        for cell in cells:
            assert cell.ours or (cell.absent and cell.absent != papers.NOT_LISTED), name


@pytest.mark.slow
def test_a_number_is_as_fine_as_its_column(cells_by_study):
    """FEDORA prints `0` among numbers of four decimals: half a unit of its last digit is no
    half."""
    names = ("FedAvg", "positive_transferability_ratio")
    [ratio] = [c for c in cells_by_study["fedora/table1"] if (c.method, c.metric) == names]
    assert (ratio.value, ratio.decimals) == (0, 4)
    answer = verdict_on([0.10, 0.11, 0.12], ratio.value, ratio.std, ratio.runs, ratio.decimals)
    assert answer["verdict"] == DIFFERS


def test_reasons_are_of_cells_that_exist(cells_by_study):
    known_reasons = {reason_for(cell)[0] for cells in cells_by_study.values() for cell in cells}
    assert {row["reason"] for row in papers.known_reasons()} <= known_reasons


# ---------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    "ours, printed, std, verdict",
    [
        ([], 90.0, 1.0, NOT_RUN),
        ([90.0], 90.0, 1.0, ONE),
        ([89.0, 90.0, 91.0], 90.4, 1.0, AGREES),
        ([89.0, 90.0, 91.0], 90.4, None, AGREES),
        ([89.0, 90.0, 91.0], 80.0, 1.0, DIFFERS),
        ([89.0, 90.0, 91.0], 80.0, None, DIFFERS),
        # two seeds ten points apart: nothing is left out, and nothing is near
        ([80.0, 90.0], 70.0, 1.0, OPEN),
        ([90.0, 90.0, 90.0], 90.004, 0.0, AGREES),  # the last printed digit
        ([90.0, 90.0, 90.0], 90.01, 0.0, DIFFERS),
    ],
)
def test_the_verdict(ours, printed, std, verdict):
    assert verdict_on(ours, printed, std, 3, 2)["verdict"] == verdict


@pytest.mark.parametrize("printed", [50.0, 51.5, 52.2, 53.0, 56.0])
def test_the_interval_is_welchs(printed):
    ours = [49.0, 50.5, 50.0, 52.0]
    verdict = SimpleNamespace(**verdict_on(ours, printed, 1.5, 3))
    peer = stats.ttest_ind_from_stats(
        verdict.mean, verdict.std, 4, printed, 1.5, 3, equal_var=False
    )
    assert (verdict.verdict == DIFFERS) == (peer.pvalue < 0.05)
    for end in (verdict.low, verdict.high):
        shifted = verdict.mean - end
        peer = stats.ttest_ind_from_stats(shifted, verdict.std, 4, printed, 1.5, 3, equal_var=False)
        assert peer.pvalue == pytest.approx(0.05)


# ---------------------------------------------------------------- numbers of a run


def run(path, rows, clients):
    summary = {"rounds": len(rows), "judge": "after", "final_kinds": {"after": 2}}
    final = [{"client": 0, "accuracy": 0.8}, {"client": 1, "accuracy": 0.9}]
    path.mkdir(exist_ok=True)
    (path / "config.yaml").write_text(yaml.safe_dump({"federation": {"rounds": len(rows)}}))
    (path / "summary.json").write_text(json.dumps(summary))
    for name, written in (("metrics", rows), ("clients", clients), ("final", final)):
        CsvTable(path / f"{name}.csv").write(written)
    return RunResult(path)


@pytest.fixture
def two(tmp_path):
    """Three rounds, the second of them best on validation data, of two clients."""
    table = {1: (0.9, 0.5, 0.1), 2: (0.6, 0.7, 0.3), 3: (0.5, 0.6, 0.2)}
    rows = [
        {
            "round": t,
            "accuracy_after": (a + b) / 2,
            "validation_accuracy": v,
            "upload_parameter_bytes": t * 2.0**20,
        }
        for t, (a, b, v) in table.items()
    ]
    clients = [
        {"round": t, "client": c, "accuracy_after": table[t][c]} for t in table for c in (0, 1)
    ]
    return run(tmp_path / "two", rows, clients)


@pytest.mark.parametrize(
    "name, value",
    {
        "best": 0.7,
        "bests": 0.8,
        "last": 0.55,
        "final": 0.85,
        "validation": 0.65,
        "transfer": 0.5,
        "relative": (0.6 - 0.5) / 0.5 / 2 + (0.7 - 0.8) / 0.8 / 2,
    }.items(),
)
def test_figures(name, value, two, tmp_path):
    """Training alone was best on validation data in its first round: with 0.5 and 0.8."""
    rows = [{"round": t, "accuracy_after": 0.65, "validation_accuracy": 1 / t} for t in (1, 2)]
    clients = [
        {"round": t, "client": c, "accuracy_after": a * t}
        for t in (1, 2)
        for c, a in ((0, 0.5), (1, 0.8))
    ]
    alone = run(tmp_path / "alone", rows, clients)
    assert number_of_run(OurNumber("kapc", {}, name), two, alone) == pytest.approx(value)
    assert math.isnan(number_of_run(OurNumber("kapc", {}, name, kind="global"), two, alone))


def test_figures_of_a_column(two):
    assert (
        number_of_run(OurNumber("kapc", {}, "mean", column="upload_parameter_bytes"), two)
        == 2 * 2.0**20
    )
    assert math.isnan(number_of_run(OurNumber("kapc", {}, "mean", column="nothing"), two))
    assert math.isnan(number_of_run(OurNumber("kapc", {}, "relative"), two))


def test_a_row_of_a_study_brings_its_judge(make_study):
    """Two rows of one run: without a word on the kind of model each is read as the study judges
    it."""
    judges = {"fedavg after": "after", "fedavg finetuned": "finetuned"}
    more = {"method": "fedavg", "judges": judges, "others": {"finetuned": [0.9] * 4}}
    folder = make_study([("fedavg", {"data.alpha": 0.1}, seed, [0.5] * 4, more) for seed in (0, 1)])
    rows = {
        "FedAvg": "fedavg after",
        "FedBABU": "fedavg finetuned",
        "KAPC": {"label": "fedavg after", "kind": "finetuned"},
    }
    study = Study.of(
        {**TINY, "forced": True, "paper": {**PAPER, "figures": {METRIC: "best"}, "rows": rows}}
    )
    lines = compare_with_paper(cells_of(study), StudyFolder(folder))
    means = {row["method"]: row["mean"] for row in listing.records(lines)}
    assert (means["FedAvg"], means["FedBABU"], means["KAPC"], means["MOON"]) == (
        50.0,
        90.0,
        90.0,
        None,
    )


# ---------------------------------------------------------------- the command


@pytest.fixture
def ask(tmp_path, monkeypatch, fl_train):
    """Runs the command on TINY with changes; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(words, **changes):
        Path("tiny.yaml").write_text(yaml.safe_dump(TINY | changes))
        return fl_train(f"reproduce {words}")

    return run


def test_end_to_end(ask, tmp_path):
    words = "tiny.yaml --workers 1 --rounds 1"
    code, out, err = ask(f"{words} --format csv --methods local --seeds 1")
    assert code == 0, err
    verdicts = {row["method"]: row["verdict"] for row in csv.DictReader(io.StringIO(out))}
    assert (verdicts["local"], verdicts["KAPC"]) == (ONE, NOT_RUN)
    code, out, err = ask(f"{words} --format csv")
    assert code == 0, err
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(out))}
    assert rows["KAPC"]["value"] == "97.97" and rows["KAPC"]["source"] == "KAPC-AAAI24, Table 1"
    for method, label in (("KAPC", "kapc"), ("local", "local")):
        runs = (tmp_path / f"studies/tiny/runs/data.alpha=0.1/{label}").glob("seed-*")
        last = [RunFolder(run).read("metrics")[-1]["accuracy_after"] for run in runs]
        assert float(rows[method]["mean"]) == pytest.approx(100 * sum(last) / 2)
        assert rows[method]["seeds"] == "2"
    why = {name: rows[name]["why"] for name in ("FedBN", "MOON", "FedProto")}
    numberless = "its runs have no such number"
    assert why == {"FedBN": "it has none", "MOON": papers.NOT_LISTED, "FedProto": numberless}
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("studies/**/summary.json")}
    assert len(before) == 4

    code, out, err = ask(words)  # nothing is run again
    assert code == 0, err
    assert "A table; NOT AS THE STUDY IS WRITTEN" in out
    assert "federation.rounds 1 (the study: 2)" in out
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in before.items())
    code, out, _ = ask("tiny.yaml --no-run --format json", seeds=[0, 1, 2])
    content = json.loads(out)
    assert "seeds 0, 1 (the study: 0, 1, 2)" in content["title"]
    assert len(content["rows"]) == len(rows)
    assert "methods='local'" in refused_line(ask("tiny.yaml --no-run --methods local"))


@pytest.mark.parametrize(
    "words, changes, said",
    [
        ("kapc/tabel1", {}, "study='kapc/tabel1'.*did you mean kapc/table1"),
        ("tiny.yaml --methods kapc,kap", {}, "methods='kap'.*did you mean kapc"),
        ("tiny.yaml --no-run", {}, "out='studies/tiny'.*there is no study in it"),
        ("tiny.yaml --data.alpha 1", {}, "data.alpha='1'.*grid sets it"),
        ("tiny.yaml --method.lam 1", {}, "method=.*list methods in the study file"),
        ("tiny.yaml --data.root none --data.source mnist", {}, "data.root="),
        ("kapc/ablation", {}, "paper=None"),
        *(
            ("tiny.yaml", {"paper": {**PAPER, **changes}}, said)
            for changes, said in (
                ({"where": 5}, "paper.where=5"),
                ({"tables": ["kapc_table1"]}, "paper.tables='kapc_table1'"),
                ({"runs": -2}, "paper.runs=-2"),
                ({"alone": "lokal"}, "paper.alone='lokal'.*did you mean local"),
                ({"rows": {"KAPC": {"figure": "best"}}}, "paper.rows.KAPC=.*its label"),
                ({"rows": {"KAPCC": "kapc"}}, "paper.rows='KAPCC'.*did you mean KAPC"),
                ({"rows": {"KAPC": "kap"}}, "paper.rows.KAPC='kap'.*did you mean kapc"),
                ({"figures": {METRIC: {"absent": "x"}}}, f"paper.figures.{METRIC}="),
                ({"settings": {ALPHA: {"data.alpha": 3}}}, "paper.settings.10 clients"),
                ({"where": {"dataset": "X"}}, "paper.settings="),
            )
        ),
        (
            "tiny.yaml",
            {"paper": {**PAPER, "settings": {ALPHA: {}}}, "grid": {"data.alpha": [0.1, 0.3]}},
            "paper.settings.10 clients.* 2 settings of the grid have these keys",
        ),
        ("tiny.yaml", {"like": "tiny.yaml"}, "like='tiny.yaml'.*leads back to the study itself"),
    ],
)
def test_what_cannot_be_is_one_line(words, changes, said, ask, tmp_path):
    assert re.search(said, refused_line(ask(words, **changes)))
    assert not (tmp_path / "studies").exists()


def test_studies_like_each_other_are_named(tmp_path):
    """By paths that grow from one to the other, until the file system refused them."""
    (folder := tmp_path / "x").mkdir()
    for one, other in ("ab", "ba"):
        (folder / f"{one}.yaml").write_text(f"like: ../x/{other}.yaml")
    with refuses("leads back to the study itself"):
        studyfile.read(str(folder / "a.yaml"))


def test_a_study_is_like_another(tmp_path):
    (tmp_path / "beside.yaml").write_text("seed: 3\n")
    (tmp_path / "a.yaml").write_text(
        yaml.safe_dump({**TINY, "base": ["kapc_exact_digits", "beside.yaml"]})
    )
    own = {
        "like": "../a.yaml",
        "base": {"data.fraction": 0.5},
        "seeds": [7],
        "paper": {"title": "another"},
    }
    (tmp_path / "in").mkdir()
    (tmp_path / "in/b.yaml").write_text(yaml.safe_dump(own))
    definition = studyfile.read(str(tmp_path / "in/b.yaml"))
    assert definition["base"] == [
        "kapc_exact_digits",
        str(tmp_path / "in/../beside.yaml"),
        {"data.fraction": 0.5},
    ]
    assert (definition["seeds"], definition["methods"]) == ([7], TINY["methods"])
    assert definition["paper"] == {**PAPER, "title": "another"}
