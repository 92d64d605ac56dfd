import dataclasses
import tarfile
from types import SimpleNamespace

import pytest
from refusals import refuses

from fl_lightning.callbacks import exhibits
from fl_lightning.configuration.config import (
    Component,
    Config,
    DataConfig,
    FabricConfig,
    ModelConfig,
)
from fl_lightning.foundation.metric import ACCURACY
from fl_lightning.results.folder import RunFolder

PLAIN = Config(
    Component("fl_lightning.methods.kapc.KAPC", {"lam": 0.5}), [ModelConfig(Component("a.MLP"))]
)


def test_a_group_is_the_runs_that_differ_by_their_seed_alone():
    group = exhibits.group_of(PLAIN)
    assert group.startswith("kapc digits dirichlet 0.1 ")
    callbacks = {"heatmaps": Component("x.Heatmaps", {"every": 3})}
    same = [{"seed": 4}, {"fabric": FabricConfig(threads=1)}, {"callbacks": callbacks}]
    same += [{"data": DataConfig(root="elsewhere")}, {"loggers": {"wandb": Component("x.WandB")}}]
    other = [{"method": Component("fl_lightning.methods.kapc.KAPC", {"lam": 0.6})}]
    other += [{"callbacks": {"quantize": Component("x.Quantize", {"bits": 8})}}]
    # such a file is the data
    other += [{"data": DataConfig(root=f"here/{name}.csv")} for name in ("one", "two")]
    groups = [exhibits.group_of(dataclasses.replace(PLAIN, **changes)) for changes in same + other]
    assert groups[:5] == [group] * 5 and len({*groups}) == 5


def alone(folder, method="local", seed=0, alpha=0.1):
    RunFolder(folder).write_final([0.5, 0.5, 0.2])
    (folder / "config.yaml").write_text(
        f"seed: {seed}\nmethod: {{name: {method}}}\ndata: {{alpha: {alpha}}}\n"
    )
    return str(folder)


def run_of():
    return SimpleNamespace(config=PLAIN, clients=3, data=SimpleNamespace(metric=ACCURACY))


def test_gain_over_local_and_share_harmed(tmp_path):
    scores = exhibits.scores_alone(alone(tmp_path), run_of())
    assert exhibits.gain({0: 0.75, 1: 0.25, 2: 0.2}, scores, ACCURACY) == {
        "gain/over_local": pytest.approx(0.0),
        "gain/share_harmed": pytest.approx(1 / 3),
    }
    assert exhibits.gain({}, scores, ACCURACY) == {}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"method": "fedavg"}, "a run of local; it is one of fedavg"),
        ({"seed": 1}, "the same seed, clients and data"),
        ({"alpha": 0.3}, "the same seed, clients and data"),
    ],
)
def test_gain_refuses_another_split_and_another_method(tmp_path, changes, words):
    with refuses(rf"loggers\.wandb\.local: .*{words}"):
        exhibits.scores_alone(alone(tmp_path, **changes), run_of())
    with refuses("finished run of training alone"):
        exhibits.scores_alone(str(tmp_path / "nowhere"), run_of())


def test_the_newest_checkpoint_is_one_file(fit, tmp_path):
    folder = fit("run", "--callbacks.checkpoint.every 1", "--federation.rounds 2")
    with tarfile.open(exhibits.pack_checkpoint(folder / "checkpoints", tmp_path)) as archive:
        names = archive.getnames()
    assert "checkpoints/manifest-round-00002.json" in names
    assert len([name for name in names if "/rows/" in name]) == 4
    (folder / "source" / "mine").mkdir(parents=True)
    (folder / "source" / "mine" / "models.py").touch()
    kept = {path.name for path in exhibits.tables_to_keep(RunFolder(folder), 2)}
    assert {"config.yaml", "metrics.csv", "models.py", "round-0002.npz"} <= kept
    assert exhibits.pack_checkpoint(tmp_path / "nothing", tmp_path) is None
