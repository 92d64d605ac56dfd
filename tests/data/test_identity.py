"""One digest of all that a run reads: the same for every seed, another one for every change of the
data."""

import numpy as np
import pytest
from PIL import Image

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare
from fl_lightning.data.identity import current


def table(root, change=""):
    lines = ["site,a,label", *(f"{k % 2},{k},{k % 3}" for k in range(60))]
    lines[5] = {"": lines[5], "value": "0,4.5,1", "label": "0,4,0", "site": "1,4,1"}.get(
        change, lines[5]
    )
    lines += ["0,99,0"] if change == "more" else []
    (root / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    return {"root": str(root / "t.csv"), "group_column": "site", "partition": "natural"}


def pictures(root, change=""):
    (root / "images" / "0" / "more.bmp").unlink(missing_ok=True)
    for k in range(40):
        (root / "images" / str(k % 2)).mkdir(parents=True, exist_ok=True)
        colour = (k, 0, 9 if change == "value" and k == 3 else 0)
        Image.new("RGB", (8, 8), colour).save(root / "images" / str(k % 2) / f"{k}.bmp")
    if change == "more":
        Image.new("RGB", (8, 8)).save(root / "images" / "0" / "more.bmp")
    return {"source": "images", "root": str(root / "images"), "partition": "iid", "min_samples": 2}


def arrays(root, change=""):
    rng = np.random.default_rng(0)
    made = {"x_train": rng.normal(size=(40, 4)), "y_train": np.arange(40) % 2}
    made |= {"x_test": rng.normal(size=(10, 4)), "y_test": np.arange(10) % 2}
    if change == "test":
        made["x_test"][3, 1] = 0
    np.savez(root / "a.npz", **made)
    np.savez(root / "p.npz", x_public=rng.normal(size=(30, 4)) + (change == "public"))
    return {
        "root": str(root / "a.npz"),
        "public": str(root / "p.npz"),
        "partition": "iid",
        "min_samples": 2,
    }


@pytest.mark.parametrize(
    "make, changes",
    [
        (table, ("value", "label", "site", "more")),
        (pictures, ("value", "more")),
        (arrays, ("test", "public")),
    ],
)
def test_it_is_the_same_for_every_seed_and_another_one_for_other_data(make, changes, tmp_path):
    config = DataConfig(**make(tmp_path))
    first = prepare(config, 2, 0).reading.digest
    assert first == prepare(config, 2, 1).reading.digest == current(config, 2, False)
    seen = {first}
    for change in changes:
        assert DataConfig(**make(tmp_path, change)) == config
        seen.add(prepare(config, 2, 0).reading.digest)
    assert len(seen) == 1 + len(changes)
    make(tmp_path)
    assert prepare(config, 2, 0).reading.digest == first


def test_where_no_test_sample_may_be_read_there_is_none_unless_all_seeds_have_the_same(tmp_path):
    keys = table(tmp_path) | {"score_on": "validation", "validation": 0.2, "min_samples": 5}
    assert prepare(DataConfig(**keys), 2, 0).reading.digest is None
    digests = {prepare(DataConfig(**keys, test_seed=0), 2, seed).reading.digest for seed in (0, 1)}
    assert len(digests) == 1 and None not in digests
