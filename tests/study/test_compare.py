"""Studies made by hand, with tables that can be checked in the head."""

import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from refusals import refuses
from scipy import stats

from fl_lightning.lab import statistics
from fl_lightning.lab.report import vector
from fl_lightning.lab.study import clients, listing, picture, scores, tables
from fl_lightning.lab.study.compare import compare_runs
from fl_lightning.lab.study.groups import ALL

LOCAL, OURS = [0.5, 0.6, 0.7, 0.8], [0.6, 0.7, 0.8, 0.7]
BOTH = {"fedavg after": "after", "fedavg finetuned": "finetuned"}


def cell(label="local", scores=LOCAL, seed=0, setting=None, **more):
    return label, setting or {}, seed, scores, more


def plan(seeds, gains=None, settings=(0.1,)):
    """`local`, and further methods whose clients are all better by a gain and something of their
    seed and setting."""
    cells = []
    for alpha, seed in itertools.product(settings, range(seeds)):
        setting = {"data.alpha": alpha} if len(settings) > 1 else {}
        cells.append(cell(seed=seed, setting=setting))
        for label, gain in (gains or {"kapc": 0.1}).items():
            extra = gain * (1 + 0.1 * seed + alpha)
            cells.append(cell(label, [score + extra for score in LOCAL], seed, setting))
    return cells


def compared(path, *more, judge=None, **options):
    return compare_runs(scores.read([path, *more], judge)[0], **options)


def rows(comparison):
    return [SimpleNamespace(**record) for record in listing.records(comparison.table)]


def row(comparison, method, setting=""):
    (one,) = [row for row in rows(comparison) if (row.method, row.setting) == (method, setting)]
    return one


# ---------------------------------------------------------------- numbers


def test_a_row_by_hand(make_study):
    second = [cell(seed=1), cell("kapc", [0.5, 0.6, 0.7, 0.9], 1)]
    comparison = compared(make_study([cell(), cell("kapc", OURS), *second]))
    ours, local = row(comparison, "kapc"), row(comparison, "local")
    assert (ours.judge, ours.seeds, ours.runs, ours.pairs) == ("after", 2, 2, 2)
    assert ours.mean == pytest.approx((0.7 + 0.675) / 2)
    assert ours.std == pytest.approx(np.std([0.7, 0.675], ddof=1))
    assert ours.worst_tenth == pytest.approx((0.6 + 0.5) / 2)
    # one client of four with one seed; equal ones are not harmed
    assert (ours.baseline, ours.harmed) == ("local", pytest.approx(0.125))
    assert ours.difference == pytest.approx((0.05 + 0.025) / 2)
    expected = statistics.interval([[np.array([0.1, 0.1, 0.1, -0.1])], [np.array([0, 0, 0, 0.1])]])
    assert (ours.low, ours.high) == pytest.approx(expected[:2])
    assert (ours.wins, ours.ties, ours.losses) == (2, 0, 0)
    assert (ours.mib, ours.seconds, ours.channel_seconds, ours.reached) == (4.0, 6.0, None, None)
    assert (local.baseline, local.harmed, local.difference) == (None, None, None)


@pytest.mark.parametrize("key", ["data", "source"])
def test_runs_on_other_samples_are_no_pair(make_study, key):
    """As many of each class, of a file that has changed between two runs."""
    path = make_study(plan(1))
    folders = sorted(file.parent for file in path.rglob("metrics.csv"))
    for folder, digest in zip(folders, ("a", "b"), strict=True):
        (folder / "provenance.json").write_text(json.dumps([{key: "a"}, {key: digest}]))
    with refuses(r"its runs cannot be paired: they differ in data\.root"):
        compared(path)


def test_clients_are_paired_by_their_number(make_study, tmp_path):
    """Not by their place in a file."""
    study = make_study(plan(2))
    before = row(compared(study), "kapc")
    file = study / "runs/all/kapc/seed-0/final.csv"
    head, *lines = file.read_text().splitlines()
    file.write_text("\n".join([head, *lines[::-1]]) + "\n")
    assert row(compared(study), "kapc") == before


def test_over_settings_a_seed_is_tested_as_one(make_study):
    """All six pairs are won, but by two seeds, which differ more than they gain."""
    cells = []
    for alpha, (seed, gain) in itertools.product((0.1, 0.2, 0.3), enumerate((0.01, 0.2))):
        at = {"data.alpha": alpha}
        better = [score + gain for score in LOCAL]
        cells += [cell(seed=seed, setting=at), cell("kapc", better, seed, at)]
    over_settings = row(compared(make_study(cells)), "kapc", ALL)
    assert (over_settings.pairs, over_settings.wins) == (6, 6)
    assert over_settings.p == pytest.approx(stats.ttest_1samp([0.01, 0.2], 0).pvalue)
    assert over_settings.star == ""


@pytest.mark.parametrize("seeds, p", [(1, None), (5, None), (6, 2 / 2**6)])
def test_tests_begin_with_six_pairs_and_intervals_with_two_seeds(make_study, seeds, p):
    ours = row(compared(make_study(plan(seeds))), "kapc")
    assert (ours.p, ours.star) == (p, "*" if p else "")
    assert {one is None for one in (ours.std, ours.low, ours.high)} == {seeds == 1}


def test_holms_correction_is_over_all_tests_of_a_table(make_study):
    comparison = compared(make_study(plan(6, {"kapc": 0.1, "fedper": 0.05, "ditto": 0.02})))
    tested = [one for one in rows(comparison) if one.p is not None]
    assert [one.p_holm for one in tested] == pytest.approx([3 * 2 / 2**6] * 3)
    assert {one.star for one in tested} == {""}


def test_over_settings_seeds_are_means_and_pairs_are_tested(make_study):
    comparison = compared(make_study(plan(3, settings=(0.1, 0.3))))
    over_settings = row(comparison, "kapc", ALL)
    single = [row(comparison, "kapc", f"data.alpha={alpha}") for alpha in (0.1, 0.3)]
    assert [one.p for one in single] == [None, None]
    # over seeds p is 0.002
    assert (over_settings.seeds, over_settings.pairs, over_settings.p, over_settings.star) == (
        3,
        6,
        2 / 2**6,
        "*",
    )
    assert over_settings.mean == pytest.approx(np.mean([one.mean for one in single]))
    differences = [0.1 * (1 + 0.1 * seed + 0.2) for seed in range(3)]
    assert over_settings.difference == pytest.approx(np.mean(differences))
    assert over_settings.std == pytest.approx(np.std(differences, ddof=1))
    assert over_settings.interval == "t"


def test_the_baseline_is_the_row_called_local_and_harm_is_against_it(make_study):
    """Not a shorter training alone that stands before it; without such a row, the first."""
    short, ours = cell("local short", [0.1] * 4), cell("kapc", OURS)
    for cells, name, harmed in (
        ([short, cell(), ours], "local", 0.25),
        ([short, ours], "local short", 0),
    ):
        kapc = row(compared(make_study(cells, name)), "kapc")
        assert (kapc.baseline, kapc.harmed) == (name, harmed)


def test_judges_have_rows_of_their_own(make_study):
    """Two cells of one run: its scores after local training, and after fine-tuning."""
    fedavg = cell("fedavg", OURS, judges=BOTH, others={"finetuned": [0.9] * 4})
    comparison = compared(make_study([cell(), fedavg, cell("kapc", OURS)]))
    assert [(one.judge, one.method, one.baseline) for one in rows(comparison)] == [
        ("after", "local", None),
        ("after", "fedavg after", "local"),
        ("after", "kapc", "local"),
        ("finetuned", "fedavg finetuned", None),
    ]
    assert row(comparison, "fedavg finetuned").mean == pytest.approx(0.9)
    assert row(comparison, "fedavg after").mean == pytest.approx(0.7)
    assert (
        row(comparison, "fedavg finetuned").harmed == 0
    )  # against local training, whatever the judge
    assert any("nothing with the same judge" in note for note in comparison.notes)


def test_seconds_are_without_scoring(make_study):
    """Of the whole run and to a target; what has no such column has the seconds of its rounds."""
    study = make_study(plan(2, {"kapc": 0.2}))
    for file in study.glob("runs/all/kapc/*/metrics.csv"):
        head, *lines = file.read_text().splitlines()
        with_scoring = [f"{head},seconds_evaluation", *(f"{line},1.0" for line in lines), ""]
        file.write_text("\n".join(with_scoring))
    comparison = compared(study)
    assert (row(comparison, "kapc").seconds, row(comparison, "local").seconds) == (4.0, 6.0)
    assert row(compared(study, target=0.4), "kapc").seconds == 2.0
    note = "time: of the rounds, without scoring (2 of 4 runs do not tell it apart)"
    assert note in comparison.notes


def test_clients_that_not_all_methods_scored_are_left_out_and_it_is_said(make_study):
    comparison = compared(make_study([cell(), cell("kapc", [0.6, 0.7, 0.8])]))
    assert row(comparison, "local").mean == pytest.approx(0.6)  # without the last client
    assert row(comparison, "kapc").difference == pytest.approx(0.1)
    note = "1 of 1 settings and seeds not all methods scored the same clients"
    assert any(note in one for one in comparison.notes)


@pytest.mark.slow
def test_ranks_over_settings(make_study):
    settings = [k / 10 for k in range(1, 9)]
    comparison = compared(make_study(plan(1, {"kapc": 0.2, "fedper": 0.1}, settings)))
    (ranks,) = comparison.ranks
    assert ranks.methods == ["local", "kapc", "fedper"]
    assert ranks.ranks == [3.0, 1.0, 2.0]
    assert (ranks.settings, ranks.chi_square) == (8, pytest.approx(16.0))
    assert ranks.cliques == []  # 3 comparisons at 2 / 2**8
    assert "Friedman over 8 settings" in listing.table(tables.comparison_listing(comparison))
    few = compared(make_study(plan(1, {"kapc": 0.2, "fedper": 0.1}, settings[:5]), name="few"))
    assert few.ranks == []
    assert any(
        "no Friedman test: it wants 6 settings" in note and "here 5 and 3" in note
        for note in few.notes
    )


@pytest.mark.parametrize(
    "file, text, what",
    [
        ("metrics", "round,mean_accuracy\n1,0.5\n", "its metrics.csv lacks rounds"),
        ("metrics", "round,mean_accuracy\nx,y\n", "its metrics.csv is damaged"),
        ("summary", '{"rounds"', "its summary.json is damaged"),
        ("final", "client,accuracy\n0,x\n", "its final.csv is damaged"),
        ("final", "client,accuracy\n0,0.5\n", "its final.csv lacks clients"),
    ],
)
def test_a_damaged_run_is_left_out_and_named(file, text, what, make_study, refused):
    """It was called unfinished, or scores of its last round stood for those of its end."""
    study = make_study(plan(2))
    run = study / "runs/all/kapc/seed-1"
    altered(run / "summary.json", clients=4)
    next(run.glob(f"{file}.*")).write_text(text)
    comparison, notes = scores.read([study])
    whole = (
        f"left out: 1 of 4 runs are damaged; the first: {run}: {what}: delete its folder to train "
        f"it again"
    )
    assert notes == [whole]
    assert row(compare_runs(comparison), "kapc").seeds == 1
    line = f"archive={str(run)!r}: {what}; delete the folder"
    assert refused(f"archive {study}").startswith(line)
    assert not study.with_suffix(".zip").exists()


def test_clients_that_failed_are_counted_below_the_table(make_study):
    study = make_study(plan(2))
    lines = [
        "2,1,upload,its upload is not finite,skipped",
        "2,3,upload,its upload is not finite,retried",
    ]
    for seed, listed in enumerate((lines, lines[1:])):
        file = study / f"runs/all/kapc/seed-{seed}/failures.csv"
        file.write_text("\n".join(["round,client,stage,reason,outcome", *listed, ""]))
    _, notes = scores.read([study])
    assert notes == [
        "clients failed, and runs went on without them: 1 visits in 1 of 4 runs, see their "
        "failures.csv"
    ]


def test_a_row_whose_runs_failed_is_named(make_study):
    missing = [cell("kapc", None, 2), cell("local", None, 2), cell("kapc", None, 3)]
    study = make_study([*plan(2), *missing])
    # seed 1 has ended since
    failed = {f"runs/all/kapc/seed-{seed}": "not finite" for seed in (1, 3)}
    (study / "failures.json").write_text(json.dumps(failed))
    assert scores.read([study])[1] == [
        "left out: 1 of 7 runs failed (kapc 1); the first: not finite; a row is a mean over those "
        "that ended",
        "unfinished: 2 of 7 runs have not ended and are left out",
    ]


def test_columns_of_a_label_with_commas_can_be_chosen(make_study):
    path = make_study([cell(), cell("fedper, slow", OURS, method="fedper")])
    listing_of_clients = clients.clients_listing(scores.read([path])[0])
    chosen = listing.choose_columns(
        listing_of_clients, "seeds,fedper, slow-difference,alone, fedper, slow"
    )
    expected = ["seeds", "fedper, slow-difference", "alone", "fedper, slow"]
    assert list(chosen.words) == ["client", *expected]
    with refuses("'fedper': no such column"):
        listing.choose_columns(listing_of_clients, "seeds,fedper,alone")


def test_the_page_on_a_study_of_regressions_is_that_of_its_runs(make_study, refused, fl_train):
    """Methods are not compared by errors, and the refusal names the report."""
    regression = {"data": {"task": "regression"}}
    path = make_study([cell(config=regression), cell("kapc", OURS, config=regression)])
    (path / "study.yaml").write_text(yaml.safe_dump({"base": regression}))
    assert "see fl-train report" in refused(f"compare {path}")
    assert fl_train(f"report {path}")[0] == 0
    assert "2 runs side by side" in (path / "report.html").read_text()


@pytest.mark.parametrize(
    "failed, note",
    [
        ({}, "unfinished: 1 of 4 runs have not ended and are left out"),
        (
            # the other has ended since
            {"runs/all/fedavg/seed-1": "not finite", "runs/all/kapc/seed-0": "no data"},
            "left out: 1 of 4 runs failed (fedavg after and fedavg finetuned 1); the first: not "
            "finite; a row is a mean over those that ended",
        ),
    ],
)
def test_a_run_of_two_rows_is_counted_once(failed, note, make_study):
    two = cell("fedavg", OURS, judges=BOTH, others={"finetuned": OURS})
    missing = cell("fedavg", None, 1, judges=BOTH)
    study = make_study([cell(), cell("kapc"), two, missing])
    (study / "failures.json").write_text(json.dumps(failed))
    assert scores.read([study])[1] == [note]
    with refuses("none of its 1 runs has ended yet"):
        scores.read([make_study([missing], "none")])


def test_nothing_is_bold_where_methods_have_not_the_same_seeds(make_study):
    """The best mean may be that of the seeds that another method lacks."""
    cells = plan(3, {"kapc": 0.1, "fedper": 0.05})
    assert compared(make_study(cells)).best == [1]
    assert cells.pop()[0] == "fedper"
    assert compared(make_study(cells, "less")).best == []


# ---------------------------------------------------------------- run folders


def test_labels_seeds_and_settings_are_read_off_run_folders(make_run):
    methods = {"local": ("local", 0), "kapc lam=0.1": ("kapc", 0.1), "kapc lam=0.5": ("kapc", 0.5)}
    runs = []
    for (method, lam), seed, alpha in itertools.product(methods.values(), (0, 1), (0.1, 0.3)):
        config = {"data": {"alpha": alpha, "root": f"/{seed}"}}
        values = OURS if method == "kapc" else LOCAL
        folder, arguments = f"{method}-{lam}-{seed}-{alpha}", {"lam": lam, "beta": 1}
        runs.append(make_run(folder, values, method, seed, config=config, arguments=arguments))
    comparison = compared(*runs)
    settings = ("data.alpha=0.1", "data.alpha=0.3", ALL)
    expected = set(itertools.product(settings, methods))
    assert {(one.setting, one.method) for one in rows(comparison)} == expected
    assert row(comparison, "kapc lam=0.5", ALL).pairs == 4
    assert row(comparison, "kapc lam=0.5", ALL).difference == pytest.approx(0.05)


def test_all_by_one_judge(make_run):
    both = {"after": [0.7] * 4}
    runs = [make_run("a", OURS), make_run("b", LOCAL, "fedavg", judge="global", others=both)]
    with refuses(r"methods that different kinds of model judge are not compared .*--judge KIND"):
        compared(*runs)
    comparison = compared(*runs, judge="after", baseline="fedavg")
    assert row(comparison, "fedavg").mean == pytest.approx(0.7)
    assert row(comparison, "kapc").difference == pytest.approx(0.0)


@pytest.mark.parametrize("base, kept", [("auto", ["local"]), ("after", ["local", "kapc"])])
def test_rows_with_a_judge_of_their_own_are_left_out_by_another(make_study, base, kept):
    """Two runs of FedAvg, as where not everyone takes part; what the base says is no row's own."""
    both = {"others": {"finetuned": [0.9] * 4, "before": [0.4] * 4}}
    auto = {"config": {"evaluation": {"judge": "auto"}}}
    tuned = {"others": {"after": [0.9] * 4, "before": [0.4] * 4}, "judge": "finetuned"}
    cells = []
    for seed in (0, 1):
        cells += [
            cell(seed=seed, **both, **auto),
            cell("kapc", OURS, seed, **both),
            cell("fedavg after", LOCAL, seed, **both),
            cell("FedAvg+FT", LOCAL, seed, method="fedavg", **tuned),
        ]
    study = make_study(cells, name=base)
    (study / "study.yaml").write_text(yaml.safe_dump({"base": {"evaluation": {"judge": base}}}))

    def labels(judge):
        comparison, notes = scores.read([study], judge)
        return list(comparison.method.unique()), notes

    ours = ["local", "kapc", "fedavg after"]
    assert labels(None) == ([*ours, "FedAvg+FT"], [])
    assert labels("after") == (ours, ["left out, since they are judged otherwise: FedAvg+FT"])
    after = ["fedavg after"] if base == "after" else []
    assert labels("finetuned")[0] == [*kept, *after, "FedAvg+FT"]
    assert labels("before")[0] == [*kept, *after]


# ---------------------------------------------------------------- what is written


def test_the_report_of_a_study_has_curves_and_a_forest_plot(make_study, fl_train):
    study = make_study(plan(3, {"kapc": 0.1, "fed<per>": 0.05}))
    assert fl_train(f"report {study} --figures svg")[0] == 0
    page, folder = (study / "report.html").read_text(), study / "report-figures"
    (curves, forest) = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert curves.startswith("accuracy by round (after local training): mean over seeds")
    assert forest.startswith("paired differences (after local training): intervals of 95 %")
    names = {"accuracy-by-round.svg", "differences-to-local.svg", "figures.json"}
    assert {file.name for file in folder.iterdir()} == names
    drawn = (folder / "accuracy-by-round.svg").read_text()
    texts = {text.strip("\u200b") for text in re.findall(r"<text[^>]*>([^<]*)</text>", drawn)}
    assert {"local", "kapc", "fed&lt;per&gt;", "round"} <= texts


def test_figures_of_the_report_before_are_replaced_and_other_files_stay(
    make_study, tmp_path, refused
):
    folder = tmp_path / "figures"
    vector.write_and_prune(folder, "svg", {"a": b"1", "b": b"2"})
    vector.write_and_prune(folder, "pdf", {"a": b"3"})
    (folder / "mine.svg").write_text("mine")
    vector.write_and_prune(folder, "svg", {"a": b"4"})
    kept = {"a.svg", "a.pdf", "mine.svg", "figures.json"}
    assert {file.name for file in folder.iterdir()} == kept
    # damaged: what is in the way is nobody's
    (folder / "figures.json").write_text('["../study/study.json", "a.')
    with refuses(r"a\.svg exists and was not written by a report"):
        vector.write_and_prune(folder, "svg", {"a": b"5"})
    study = make_study(plan(2))
    (study / "report-figures").mkdir()
    mine = study / "report-figures/accuracy-by-round.svg"
    mine.write_text("mine")
    line = refused(f"report {study} --figures svg")
    assert line.startswith("figures='svg': ")
    assert mine.read_text() == "mine"
    assert not (study / "report.html").exists()


def test_curves_are_means_and_bands_over_seeds(make_study):
    read_cells = scores.read([make_study(plan(3))])[0]
    drawn = picture.draw(read_cells, compare_runs(read_cells))
    (axes,) = drawn["accuracy-by-round"][0].axes
    ours = axes.lines[1]
    means = [run.column("mean_accuracy")[1] for run in read_cells.run[read_cells.method == "kapc"]]
    assert list(ours.get_xdata()) == [1, 2] and ours.get_ydata()[1] == pytest.approx(np.mean(means))
    band = axes.collections[1].get_paths()[0].vertices
    at_end = band[band[:, 0] == 2][:, 1]
    assert at_end.max() - at_end.min() == pytest.approx(2 * np.std(means, ddof=1))
    (axes,) = drawn["differences-to-local"][0].axes
    expected = row(compare_runs(read_cells), "kapc")
    assert list(axes.lines[0].get_xdata()) == pytest.approx(
        [100 * expected.low, 100 * expected.high]
    )
    assert axes.lines[1].get_xdata() == pytest.approx([100 * expected.difference])


def test_latex_with_chosen_columns_caption_and_the_best_in_bold(make_study, fl_train):
    """Bold is a mean whose difference to the next best has an interval above 0: with one seed there
    is none."""
    words = "--format latex --columns mean,difference --caption 'Digits, 100 %' --label tab:a"
    bold = {}
    for seeds in (3, 1):
        study = make_study(plan(seeds, {"kapc": 0.1, "fed|per": 0.05}), name=f"of-{seeds}")
        code, out, _ = fl_train(f"compare {study} {words}")
        assert code == 0
        bold[seeds] = [line.split(" & ")[0] for line in out.splitlines() if "textbf" in line]
    assert bold == {3: ["kapc"], 1: []}
    assert r"\caption{Digits, 100 \%}" in out and r"\label{tab:a}" in out
    assert r"method & mean $\pm$ std & difference \\" in out and r"fed\textbar{}per & " in out


def test_a_row_for_each_client(make_study, fl_train, refused):
    study = make_study(plan(3))

    def split(file, *rows):
        lines = ["client,train_samples,test_samples,name", *rows, ""]
        (file.parent / "split.csv").write_text("\n".join(lines))

    runs = sorted(study.glob("runs/**/final.csv"))
    for file in runs:
        split(file, *(f"{c},{10 + c},5,site {c}" for c in range(4)))
    listed = json.loads(fl_train(f"compare {study} --clients --format json")[1])["rows"]
    (ours,) = [one for one in listed if (one["name"], one["method"]) == ("site 2", "kapc")]
    assert (ours["train_samples"], ours["test_samples"], ours["seeds"]) == ([12], [5], 3)
    gains = [0.1 * (1 + 0.1 * seed + 0.1) for seed in range(3)]
    half = stats.t.ppf(0.975, 2) * np.std(gains, ddof=1) / np.sqrt(3)
    mean = np.mean(gains)
    expected = (LOCAL[2], LOCAL[2] + mean, mean, mean - half, mean + half)
    comparison = [ours[name] for name in ("alone", "mean", "difference", "low", "high")]
    assert comparison == pytest.approx(expected)
    split(runs[0], "0,99,5,site 0")
    line = refused(f"compare {study}")
    assert "clients of" in line and "have other samples" in line
    for file in study.glob(f"runs/**/{runs[0].parent.name}/final.csv"):
        split(file, "2,99,5,site 2")
    code, out, _ = fl_train(f"compare {study} --clients")
    assert code == 0 and "a client has other samples with each seed" in out


@pytest.mark.parametrize("form", ["table", "html"])
def test_only_an_earlier_comparison_is_written_over(make_study, tmp_path, form, fl_train):
    out = tmp_path / "out"
    line = f"compare {make_study(plan(2))} --format {form} --out {out}"
    for _ in range(2):
        assert fl_train(line)[0] == 0 and "kapc" in out.read_text()
    out.write_text("mine")
    assert fl_train(line)[0] == 2 and out.read_text() == "mine"


@pytest.mark.slow
def test_the_critical_difference_picture(make_study):
    settings = [k / 10 for k in range(1, 7)]
    study = make_study(plan(1, {"kapc": 0.2, "fedper": 0.1, "fedrep": 0.1}, settings))
    (axes,) = picture.draw_ranks(compared(study).ranks).axes
    texts = [text.get_text() for text in axes.get_yticklabels()]
    assert texts == ["kapc  1.00", "fedper  2.50", "fedrep  2.50", "local  4.00"]
    # fedper and fedrep are the same, and with six settings nothing is told apart
    assert sum(line.get_linewidth() == 4 for line in axes.lines) == 1


# ---------------------------------------------------------------- what cannot be compared


def altered(file, **changes):
    """Writes a JSON file with other values."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "words, said",
    {
        "s --baseline locla": "baseline='locla'.*no such method .did you mean local",
        "s --target 90": r"\(0, 1\]",
        "s --format xlsx": "format",
        "s --out none/a.csv": "no folder",
        "": "must be given",
        "none": "it must be a run folder, but does not exist",
        "s s": "give it alone, or several run folders",
        "s --judge finetuned": "judge='finetuned'",
        "s --columns maen": "no such column .did you mean mean",
        "s --format csv --columns mean": "--format csv writes all columns",
        "s --caption x": "caption='x': it is only for --format latex",
        "s --label x": "label='x': ",
        "s --clients --target 0.5": "leave it or --clients out",
    }.items(),
)
def test_flags_that_cannot_work(words, said, make_study, tmp_path, refused, monkeypatch):
    make_study(plan(2), name="s")
    monkeypatch.chdir(tmp_path)
    assert re.search(said, refused(f"compare {words}"))
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize(
    "said, cells",
    {
        "none of its 2 runs has ended yet": [cell("local", None), cell("kapc", None)],
        "there are no pairs": [cell(), cell("kapc", OURS, 1)],
        "it is the only method": [cell(), cell(seed=1)],
        "runs of 'kapc' have different judges": [
            cell(),
            cell("kapc", OURS),
            cell("kapc", OURS, 1, judge="before"),
        ],
        "they differ in federation.clients": [
            cell(),
            cell("kapc", OURS, config={"federation": {"clients": 9}}),
        ],
    }.items(),
)
def test_studies_that_cannot_be_paired(make_study, refused, said, cells):
    assert said in refused(f"compare {make_study(cells)}")


def test_what_cannot_be_read_is_refused(make_study, make_run, refused):
    first, second, local = make_run("a", OURS), make_run("b", OURS), make_run("c", LOCAL, "local")
    line = refused(f"compare {first} {second} {local}")
    assert "are both 'kapc': leave one out" in line
    config = yaml.safe_load((local / "config.yaml").read_text())
    (local / "config.yaml").write_text(yaml.safe_dump(config | {"seed": None}))
    assert "its config.yaml names no seed" in refused(f"compare {first} {local}")
    study = make_study(plan(2))
    for text in ("", "[]", '{"cells": [1]}', '{"cells": [{"label": "a"}]}'):
        (study / "study.json").write_text(text)
        assert "study.json cannot be read" in refused(f"compare {study}")


def config(**groups):
    return {"config": groups}


@pytest.mark.parametrize(
    "before, now, said",
    [
        (
            {"arguments": {"lam": 0.1}},
            {"arguments": {"lam": 0.5}},
            "method.init_args.lam is 0.1 in",
        ),
        ({}, config(optimizer={"nesterov": True}), "optimizer.nesterov is False in"),
        ({}, config(callbacks={"topk": {}}), "callbacks is [] in"),
        (
            config(callbacks={"topk": {"share": 0.1}}),
            config(callbacks={"topk": {"share": 0.2}}),
            "callbacks.topk.share is 0.1 in",
        ),
        # what runs had before there was such a key
        ({}, config(optimizer={"nesterov": False}), ""),
        ({}, {"arguments": {"mixes": "all"}}, ""),  # nobody knows what they had
        ({}, config(callbacks={"heatmaps": {"every": 5}}), ""),
    ],
)
def test_runs_of_a_row_are_of_one_method(make_study, refused, before, now, said):
    """Seeds that came later, under another version."""
    cells = [cell(), cell(seed=1), cell("kapc", OURS, **before), cell("kapc", OURS, 1, **now)]
    study = make_study(cells)
    if said:
        line = refused(f"compare {study}")
        assert f"compare='kapc': its runs are of different methods: {said}" in line
        assert "seed-0, " in line and line.endswith("seed-1")
    else:
        assert row(compared(study), "kapc").seeds == 2


def test_a_method_may_have_other_arguments_in_another_setting(make_study):
    cells = []
    for alpha in (0.1, 0.3):
        at = {"data.alpha": alpha}
        cells += [cell(setting=at), cell("kapc", OURS, 0, at, arguments={"lam": alpha})]
    assert row(compared(make_study(cells)), "kapc", ALL).pairs == 2


def test_by_another_metric(make_run, refused):
    """Of final models; a client of which it is not defined is left out, and runs that do not have
    it are refused."""
    names = itertools.product(("local", "kapc"), (0, 1))
    runs = [make_run(f"{method}-{seed}", [0.5] * 3, method, seed) for method, seed in names]
    values = (0.1, 0.2, 0.4, 0.8)
    for run, value in zip(runs, values, strict=True):
        lines = ["client,accuracy,auroc", "0,0.5,", f"1,0.5,{value}", f"2,0.5,{value}", ""]
        (run / "final.csv").write_text("\n".join(lines))
    comparison, notes = scores.read(runs, metric="auroc")
    assert [dict(one) for one in comparison.scores] == [{1: v, 2: v} for v in values]
    kapc = row(compare_runs(comparison), "kapc")
    assert kapc.mean == pytest.approx(0.6) and kapc.difference == pytest.approx(0.45)
    assert any("AUROC" in note and "not accuracies" in note for note in notes)
    line = refused(f"compare {' '.join(map(str, runs))} --metric f1")
    assert line.startswith("metric='f1'") and "evaluation.metrics" in line
