import dataclasses
import tarfile

from fl_lightning.callbacks import exhibits
from fl_lightning.configuration.config import (
    Component,
    Config,
    DataConfig,
    FabricConfig,
    ModelConfig,
)
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
