"""What a study file asks for: its checks, labels, folders and cells."""

import pytest
from refusals import refuses

from fl_lightning.lab.study.grid import MAX_LABEL_BYTES, Study, safe

PLAIN = {
    "base": "kapc_exact_digits",
    "methods": ["kapc", {"name": "FedProx", "mu": 0.5}],
    "seeds": "0-1",
}


def study(**changes):
    return Study.of({**PLAIN, **changes})


def cells(found, participation=1.0):
    return [cell for run in found.runs(participation) for cell in run.cells()]


def test_cells_are_methods_in_settings_with_seeds():
    grid = {"data.alpha": [0.1, 0.3], "model.hidden": [[16], [64, 32]]}
    found = cells(study(grid=grid, forced=False))
    assert len(found) == 2 * 4 * 2
    assert found[0] == {
        "setting": {"data.alpha": 0.1, "model.hidden": [16]},
        "method": "kapc",
        "label": "kapc",
        "seed": 0,
        "folder": "runs/data.alpha=0.1,model.hidden=16/kapc/seed-0",
        "forced": False,
    }
    assert found[-1]["folder"] == "runs/data.alpha=0.3,model.hidden=64-32/fedprox,mu=0.5/seed-1"
    assert [cell["seed"] for cell in found] == [0] * 8 + [1] * 8  # seed by seed
    assert len({cell["folder"] for cell in found}) == len(found)


def test_keys_of_a_grid_can_vary_together():
    sizes = [
        {"federation.clients": 10, "data.fraction": 0.1},
        {"federation.clients": 20, "data.fraction": 0.2},
    ]
    found = study(grid={"size": sizes, "data.alpha": [0.1, 0.3]})
    assert found.settings()[2] == {
        "federation.clients": 20,
        "data.fraction": 0.2,
        "data.alpha": 0.1,
    }
    assert len(found.settings()) == 4
    assert (
        found.runs(1.0)[0].folder
        == "runs/federation.clients=10,data.fraction=0.1,data.alpha=0.1/kapc/seed-0"
    )


def test_a_method_has_arguments_of_its_own_in_a_setting():
    methods = [{"name": "kapc", "lam": 2, "beta": 1, "when": {"data.alpha=0.3": {"beta": 5}}}]
    found = study(methods=methods, grid={"data.alpha": [0.1, 0.3]}, seeds=[0], forced=False)
    arguments = [run.entry.arguments_in(run.setting) for run in found.runs(1.0)]
    assert arguments == [{"lam": 2, "beta": 1}, {"lam": 2, "beta": 5}]
    assert {run.entry.label for run in found.runs(1.0)} == {"kapc lam=2 beta=1"}


def test_forced_rows_share_one_run_of_fedavg():
    found = [cell for cell in cells(study(seeds=[3])) if cell["forced"]]
    assert [(cell["label"], cell["method"], cell.get("judge")) for cell in found] == [
        ("local", "local", None),
        ("fedavg after", "fedavg", "after"),
        ("fedavg finetuned", "fedavg", "finetuned"),
    ]
    assert found[1]["folder"] == found[2]["folder"] == "runs/fedavg,personalised/seed-3"
    assert len(study(seeds=[3]).runs(1.0)) == 4


def test_forced_rows_have_runs_of_their_own_where_not_everyone_takes_part():
    """Only the judge's final models are scored for clients that were not in the last round."""
    found = study(seeds=[0], grid={"federation.participation": [0.5, 1.0]})
    forced = [run for run in found.runs(1.0) if run.entry.forced]
    assert [run.setting["federation.participation"] for run in forced] == [0.5, 0.5, 0.5, 1.0, 1.0]
    assert [run.entry.settings.get("evaluation.judge") for run in forced] == [
        None,
        "after",
        "finetuned",
        None,
        "after",
    ]
    rows = [
        {cell["label"] for run in forced for cell in run.cells() if run.setting == s}
        for s in found.settings()
    ]
    assert rows[0] == rows[1] == {"local", "fedavg after", "fedavg finetuned"}
    assert len(study(seeds=[0]).runs(0.5)) == 5


def test_a_listed_row_is_not_forced_again():
    found = cells(study(methods=["local", {"name": "local", "epochs": 5}], seeds=[0]))
    assert [(cell["label"], cell["forced"]) for cell in found] == [
        ("local", False),
        ("local epochs=5", False),
        ("fedavg after", True),
        ("fedavg finetuned", True),
    ]
    assert not any(cell["forced"] for cell in cells(study(forced=False)))


def test_labels():
    methods = [
        {"name": "kapc", "lam": 0.05, "rho_units": "spread", "optimizer.lr": 0.1},
        {"name": "my_methods.Mine", "layers": [1, 2]},
        {"name": "kapc", "init_args": {"lam": 1}, "label": "KAPC, ours"},
        {"name": "kapc", "solver": "a/b"},
    ]
    entries = study(methods=methods, forced=False).entries()
    assert [entry.label for entry in entries[:3]] == [
        "kapc lam=0.05 rho_units=spread optimizer.lr=0.1",
        "mine layers=1-2",
        "KAPC, ours",
    ]
    assert entries[0].settings == {"optimizer.lr": 0.1}
    assert entries[1].name == "my_methods.Mine"
    assert entries[2].arguments == {"lam": 1}
    assert "/" not in entries[3].label


def test_names_of_folders_are_safe_and_differ():
    texts = ["a/b", "a:b", "..", ".hidden", "x" * 300, "x" * 301, "é", "[1]"]
    found = [safe(text) for text in texts]
    assert len(set(found)) == len(texts)
    for name in found:
        assert (
            "/" not in name and not name.startswith(".") and len(name.encode()) <= MAX_LABEL_BYTES
        )
        assert safe(name) == name
    assert safe("kapc lam=0.5") == "kapc lam=0.5"


@pytest.mark.parametrize(
    "given, seeds", [("0-4", [0, 1, 2, 3, 4]), (" 7-7 ", [7]), ([5, 1], [5, 1])]
)
def test_seeds(given, seeds):
    assert study(seeds=given).seeds == seeds


@pytest.mark.parametrize(
    "given", ["4-0", "0-", "a", "", [], [1, 1], [-1], [0.5], [True], ["0-4"], 3, {}, "0-9999999999"]
)
def test_bad_seeds(given):
    with refuses(r"^seeds="):
        study(seeds=given)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"methods": []}, "methods="),
        ({"methods": ["kapc", "kapk"]}, r"methods\[1\]='kapk'.*did you mean kapc"),
        ({"methods": [{"lam": 0.5}]}, r"methods\[0\]=.*which method"),
        ({"methods": ["kapc", "KAPC"]}, r"methods\[1\]='kapc'.*methods\[0\] has the same label"),
        (
            {"methods": [{"name": "kapc", "label": "fedavg after"}]},
            r"forced='fedavg after'.*methods\[0\]",
        ),
        ({"methods": [{"name": "kapc", "label": "a/b"}]}, r"methods\[0\].label='a/b'"),
        (
            {"methods": [{"name": "kapc", "data.alpha": 1}]},
            r"methods\[0\].data.alpha=1.*optimizer",
        ),
        (
            {"methods": [{"name": "kapc", "optimizer.lr": 1}], "grid": {"optimizer.lr": [1]}},
            r"methods\[0\]='optimizer.lr'.*the grid sets it",
        ),
        ({"grid": {}}, "grid={}"),
        ({"grid": {"data.alpha": 0.1}}, "grid.data.alpha=0.1.*list"),
        ({"grid": {"data.alpha": [0.1, "1e-1"]}}, "grid.data.alpha=.*twice"),
        ({"grid": {"a": [{"data.alpha": 1}, {"data.alpha": 1.0}]}}, "grid.a=.*twice"),
        ({"grid": {"seed": [1]}}, "grid.seed="),
        ({"grid": {"method.lam": [1]}}, "grid.method.lam="),
        (
            {"grid": {"a": [{"data.alpha": 1}, {"data.fraction": 1}]}},
            "grid.a=.*each must have the keys data.alpha",
        ),
        ({"grid": {"a": [{"data.alpha": 1}], "data.alpha": [2]}}, "grid='data.alpha'.*set twice"),
        (
            {
                "methods": [{"name": "kapc", "when": {"data.alpha=3": {"lam": 1}}}],
                "grid": {"data.alpha": [1]},
            },
            r"methods\[0\].when='data.alpha=3'.*it has data.alpha=1",
        ),
        ({"forced": "yes"}, "forced='yes'"),
        ({"base": None}, "base=None"),
        ({"grid": {"data.alpha": [k + 1 for k in range(3000)]}}, "study=.*at most 10000 runs"),
    ],
)
def test_bad_studies(changes, said):
    with refuses(f"^{said}"):
        study(**changes)


@pytest.mark.parametrize("content", [None, [], "kapc", 3])
def test_no_mapping(content):
    with refuses(r"^study=.*base, methods, seeds"):
        Study.of(content)
