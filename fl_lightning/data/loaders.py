"""Samples of a user's data sets and loaders.

Clients make their own batches. Settings of a loader that would change the samples are refused; a
line is printed for those that have no effect.
"""

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

UNUSED_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks that a Lightning Trainer calls for every batch; a module that overrides one is refused."""
READ_TWICE = 16
"""Number of samples that are read a second time, to detect random transforms. A flip at 0.5 escapes
in one of 65,536 data sets. Ours."""


def samples_of_module(
    setting: Setting,
    module: LightningDataModule,
    *,
    reads_test: bool = True,
) -> tuple[list[Any], list[Any] | None]:
    """Return the samples of the module's training loader and of its test loader, each sample once.

    The second list is None if the module has no test loader. If it has one, but `reads_test` is
    False, the training samples are returned twice, and the test samples are not read.

    Raises:
        BadInput: a loader or the module changes samples or batches in a way that clients would
            ignore.
    """
    hooks = [hook for hook in UNUSED_HOOKS if is_overridden(hook, module)]
    requirement = (
        f"its {', '.join(hooks)} would not be called: change samples in the data set's __getitem__"
    )
    setting.check(not hooks, requirement)
    module.prepare_data()
    module.setup("fit")
    train = samples_of_loader(setting, "train_dataloader", module.train_dataloader())
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
    return train, samples_of_loader(setting, "test_dataloader", module.test_dataloader())


def samples_of_loader(
    setting: Setting,
    hook: str,
    loader: Any,
) -> list[Any]:
    """Return the samples that a loader can yield, each once.

    Args:
        setting: the key and value that errors name.
        hook: the module's method that returned the loader.
        loader: the loader.

    Raises:
        BadInput: it is no DataLoader of torch, or it draws, repeats or changes samples.
    """
    kind = type(loader)
    is_data_loader = isinstance(loader, DataLoader) and kind.__iter__ is DataLoader.__iter__
    setting.check(
        is_data_loader,
        f"its {hook}() gives a {kind.__name__}: it must give one DataLoader of torch",
    )
    is_default = loader.collate_fn in (default_collate, default_convert)
    requirement = (
        f"the collate_fn {_name(loader.collate_fn)} of its {hook}() would not be called, since "
        f"clients make their"
    )
    setting.check(
        is_default, f"{requirement} own batches: change samples in the data set's __getitem__"
    )
    check_data_set(setting, loader.dataset)
    indices = _indices(setting, hook, loader)
    _say_without_effect(setting, hook, loader)
    return samples_of_data_set(setting, loader.dataset, indices)


def check_data_set(setting: Setting, samples: Any) -> None:
    """Raise `BadInput` if single samples of a data set cannot be read by index."""
    name = type(samples).__name__
    setting.check(
        not isinstance(samples, IterableDataset),
        f"{name} is an IterableDataset: give a Dataset with a length",
    )
    setting.check(
        hasattr(samples, "__len__"), f"{name} has no __len__: give a Dataset with a length"
    )


def samples_of_data_set(
    setting: Setting,
    samples: Any,
    indices: Sequence[int] | None = None,
) -> list[Any]:
    """Read the samples of a data set at `indices` (None: all).

    Raises:
        BadInput: a second reading returns other samples.
    """
    indices = range(len(samples)) if indices is None else indices
    read = [samples[index] for index in indices]
    for index, sample in zip(indices[:READ_TWICE], read, strict=False):
        requirement = (
            f"sample {index} of {type(samples).__name__} differs at each reading (a random "
            f"transform?), but"
        )
        same = _content(sample) == _content(samples[index])
        setting.check(
            same,
            f"{requirement} samples are read once: remove the transform; data.augment draws anew "
            f"in each epoch",
        )
    return read


def _indices(
    setting: Setting,
    hook: str,
    loader: DataLoader[Any],
) -> Sequence[int]:
    """Return the indices of the samples that a loader's sampler can yield."""
    batches = loader.batch_sampler
    instead = (
        "clients make their own batches: choose samples by a SubsetRandomSampler or a "
        "torch.utils.data.Subset"
    )
    is_default = batches is None or type(batches) is BatchSampler
    setting.check(
        is_default,
        f"the batch_sampler {_name(batches)} of its {hook}() has no effect, since {instead}",
    )
    sampler: Any = batches.sampler if isinstance(batches, BatchSampler) else loader.sampler
    named_sampler = f"the sampler {_name(sampler)} of its {hook}()"
    if type(sampler) is SequentialSampler:
        return range(len(sampler.data_source))
    if type(sampler) is RandomSampler:
        size = len(sampler.data_source)
        is_whole = not sampler.replacement and sampler.num_samples == size
        how = (
            f"draws {sampler.num_samples} of {size} samples "
            f"with{'' if sampler.replacement else 'out'} replacement"
        )
        setting.check(
            is_whole,
            f"{named_sampler} {how}, but clients take each sample once in an epoch: remove it",
        )
        return range(size)
    chosen = sampler.indices if type(sampler) is SubsetRandomSampler else sampler
    is_indexed = isinstance(chosen, list | tuple | range | np.ndarray | Tensor)
    setting.check(is_indexed, f"{named_sampler} has no effect, since {instead}")
    indices = [int(index) for index in chosen]
    setting.check(
        len(set(indices)) == len(indices), f"{named_sampler} repeats samples: give each index once"
    )
    return indices


def _say_without_effect(
    setting: Setting,
    hook: str,
    loader: DataLoader[Any],
) -> None:
    """Print a line that names the settings of a loader that have no effect, if it has any."""
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
    """Return the bytes of a sample's arrays and texts, for a comparison; other parts are left
    out."""
    parts = sample if isinstance(sample, tuple | list) else (sample,)
    contents = []
    for part in parts:
        try:
            array = np.asarray(part)
        except Exception:  # a part may raise anything; the reader of the samples refuses it
            continue
        if array.dtype != object:
            contents.append(array.tobytes())
    return contents


def _name(part: Any) -> str:
    return str(getattr(part, "__name__", type(part).__name__))
