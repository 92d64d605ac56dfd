"""Which samples a user's data sets and loaders give. What a loader does beyond that is refused, or
a line says that it has no effect: clients make batches of their own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from lightning import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,
    default_convert,
)

from fl_lightning.data.source import Setting

UNHEEDED = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks that a Lightning Trainer calls for every batch. A module that changes batches in one is
refused."""
READ_TWICE = 16
"""Samples of a data set that are read a second time: a random transform shows. A flip at 0.5 goes
unseen in one of 65,536 data sets. Ours."""


def parts_of(
    setting: Setting,
    module: LightningDataModule,
    *,
    reads_test: bool = True,
) -> tuple[list[Any], list[Any] | None]:
    """The samples that the module's loaders for training and for tests can yield, each once; None:
    it has no loader for tests. Without `reads_test` the training samples stand in for those of
    tests.

    Raises:
        BadInput: a loader or the module does to samples or batches what clients would not do.
    """
    hooks = [hook for hook in UNHEEDED if is_overridden(hook, module)]
    requirement = (
        f"its {', '.join(hooks)} would not be called: change samples in the data set's __getitem__"
    )
    setting.check(not hooks, requirement)
    module.prepare_data()
    module.setup("fit")
    train = of_loader(setting, "train_dataloader", module.train_dataloader())
    if is_overridden("val_dataloader", module):
        setting.say(
            "its val_dataloader() is not read: data.validation cuts validation parts from the "
            "training data"
        )
    if not is_overridden("test_dataloader", module):
        return train, None
    if not reads_test:
        return train, train
    module.setup("test")
    return train, of_loader(setting, "test_dataloader", module.test_dataloader())


def of_loader(
    setting: Setting,
    hook: str,
    loader: Any,
) -> list[Any]:
    """The samples that a loader, which the module's `hook` gives, can yield: each once.

    Raises:
        BadInput: it is no DataLoader of torch, or it draws, repeats or changes samples.
    """
    kind = type(loader)
    single = isinstance(loader, DataLoader) and kind.__iter__ is DataLoader.__iter__
    setting.check(
        single, f"its {hook}() gives a {kind.__name__}: it must give one DataLoader of torch"
    )
    plain = loader.collate_fn in (default_collate, default_convert)
    requirement = (
        f"the collate_fn {_name(loader.collate_fn)} of its {hook}() would not be called, since "
        f"clients make their"
    )
    setting.check(plain, f"{requirement} own batches: change samples in the data set's __getitem__")
    check_data_set(setting, loader.dataset)
    places = _places(setting, hook, loader)
    _say_without_effect(setting, hook, loader)
    return of_data_set(setting, loader.dataset, places)


def check_data_set(setting: Setting, samples: Any) -> None:
    """Raise `BadInput` where single samples of a data set cannot be read by their number."""
    name = type(samples).__name__
    setting.check(
        not isinstance(samples, IterableDataset),
        f"{name} is an IterableDataset: give a Dataset with a length",
    )
    setting.check(
        hasattr(samples, "__len__"), f"{name} has no __len__: give a Dataset with a length"
    )


def of_data_set(
    setting: Setting,
    samples: Any,
    places: Sequence[int] | None = None,
) -> list[Any]:
    """The samples of a data set at `places`; None: all.

    Raises:
        BadInput: a second reading gives other samples.
    """
    places = range(len(samples)) if places is None else places
    read = [samples[place] for place in places]
    for place, sample in zip(places[:READ_TWICE], read, strict=False):
        requirement = (
            f"sample {place} of {type(samples).__name__} is another at each reading (a random "
            f"transform?), and"
        )
        same = _content(sample) == _content(samples[place])
        setting.check(
            same,
            f"{requirement} samples are read once: take that out; data.augment draws anew in each "
            f"epoch",
        )
    return read


def _places(
    setting: Setting,
    hook: str,
    loader: DataLoader[Any],
) -> Sequence[int]:
    """The numbers of the samples that a loader's samplers can yield."""
    batches = loader.batch_sampler
    instead = (
        "clients make their own batches: choose samples by a SubsetRandomSampler or a "
        "torch.utils.data.Subset"
    )
    usual = batches is None or type(batches) is BatchSampler
    setting.check(
        usual,
        f"the batch_sampler {_name(batches)} of its {hook}() would not be used, since {instead}",
    )
    sampler: Any = batches.sampler if isinstance(batches, BatchSampler) else loader.sampler
    called = f"the sampler {_name(sampler)} of its {hook}()"
    if type(sampler) is SequentialSampler:
        return range(len(sampler.data_source))
    if type(sampler) is RandomSampler:
        size = len(sampler.data_source)
        whole = not sampler.replacement and sampler.num_samples == size
        how = (
            f"draws {sampler.num_samples} of {size} samples "
            f"with{'' if sampler.replacement else 'out'} replacement"
        )
        setting.check(
            whole, f"{called} {how}, and clients take each sample once in an epoch: leave it out"
        )
        return range(size)
    chosen = sampler.indices if type(sampler) is SubsetRandomSampler else sampler
    indexed = isinstance(chosen, list | tuple | range | np.ndarray | Tensor)
    setting.check(indexed, f"{called} would not be used, since {instead}")
    places = [int(place) for place in chosen]
    setting.check(len(set(places)) == len(places), f"{called} repeats samples: name each once")
    return places


def _say_without_effect(
    setting: Setting,
    hook: str,
    loader: DataLoader[Any],
) -> None:
    """A line that names what is legitimate in a loader and has no effect here, if anything is."""
    batches = loader.batch_sampler
    sampler = batches.sampler if isinstance(batches, BatchSampler) else loader.sampler
    trains = hook == "train_dataloader"
    names = []
    if isinstance(batches, BatchSampler):
        names += [f"batch_size={batches.batch_size}"] if trains and batches.batch_size > 1 else []
        names += ["drop_last=True"] if batches.drop_last else []
    drawn = loader.generator is not None or getattr(sampler, "generator", None) is not None
    names += ["generator"] if trains and drawn else []
    names += ["worker_init_fn"] if loader.worker_init_fn is not None else []
    instead = "every sample is scored"
    if trains:
        instead = (
            "clients train on every sample, in batches of federation.batch_size, ordered by the "
            "run's seed"
        )
    if names:
        setting.say(f"{', '.join(names)} of its {hook}() without effect: {instead}")


def _content(sample: Any) -> list[bytes]:
    """What a sample consists of, to be compared; nothing of what is neither numbers nor text."""
    parts = sample if isinstance(sample, tuple | list) else (sample,)
    contents = []
    for part in parts:
        try:
            array = np.asarray(part)
        except Exception:  # whatever a part raises that cannot be an array; its reader says so
            continue
        if array.dtype != object:
            contents.append(array.tobytes())
    return contents


def _name(part: Any) -> str:
    return str(getattr(part, "__name__", type(part).__name__))
