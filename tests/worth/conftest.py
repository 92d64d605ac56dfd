"""Six hospitals with everything that can be wrong with them, and one small `fl-train worth` over
them."""

import fcntl
import os
import shlex
import shutil

import numpy as np
import pytest

from fl_lightning.cli import main

SIZES = {"Aarau": 90, "Basel": 70, "Chur": 50, "Zug": 3, "Pure": 45}
"""Pure has ill people alone, Zug three patients; Twin is Chur again, and ten of Basel's patients
are Aarau's, too."""
SMALL = (
    "--config hospitals.yaml --model mlp --model.hidden [8] --federation.rounds 1 "
    "--federation.local_epochs 1 "
    "--fabric.accelerator cpu --methods fedper --workers 1"
)
BASE = (
    "data: {source: table, root: hospitals.csv, label_column: ill, group_column: hospital, "
    "partition: natural}\n"
    "federation.clients: 6\n"
)


def write_hospitals(folder):
    """`hospitals.csv`, and the config `hospitals.yaml` that names it."""
    rng = np.random.default_rng(0)
    rows = {}
    for name, size in SIZES.items():
        x = rng.normal(size=(size, 4))
        ill = (x[:, 0] + x[:, 1] + rng.logistic(size=size) > 0) | (name == "Pure")
        rows[name] = [
            ",".join([*(f"{v:.5f}" for v in one), str(int(sick))])
            for one, sick in zip(x, ill, strict=True)
        ]
    rows["Twin"] = rows["Chur"]
    rows["Basel"][:10] = rows["Aarau"][:10]
    lines = [
        "hospital,a,b,c,d,ill",
        *(f"{name},{row}" for name, own in rows.items() for row in own),
    ]
    (folder / "hospitals.csv").write_text("\n".join(lines))
    (folder / "hospitals.yaml").write_text(BASE)


@pytest.fixture(scope="session")
def out(tmp_path_factory):
    """The folder of a finished `fl-train worth`, which all tests read; one for all processes of the
    tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "worth"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "answer" / "worth.html").exists():
            write_hospitals(folder)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                assert (
                    main(["worth", *shlex.split(SMALL), "--out", "answer", "--repeats", "4"]) == 0
                )
    return folder / "answer"


@pytest.fixture
def copy(out, tmp_path, monkeypatch):
    """Its own copy, which the command finds as `answer`."""
    shutil.copytree(out.parent, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy" / "answer"
