"""What must hold of any input: configs, partitions, payloads, robust means, tables (hypothesis)."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fl_lightning.callbacks.compression import largest, quantised
from fl_lightning.configuration.config import DataConfig
from fl_lightning.configuration.files import read_config
from fl_lightning.configuration.resolve import resolve, to_yaml
from fl_lightning.data import partition
from fl_lightning.foundation.csvtable import CsvTable
from fl_lightning.foundation.errors import BadInput

same = settings(
    deadline=None,  # cores are shared
    derandomize=True,  # the same inputs in every run of the suite
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)

# ---------------------------------------------------------------- configs

positive = st.floats(1e-6, 1e6)
share = st.floats(1e-6, 1.0)
PLAIN = {
    "seed": st.integers(0, 2**63 - 1),
    "smoke": st.booleans(),
    "federation.rounds": st.integers(1, 10**9),
    "federation.clients": st.integers(1, 10**6),
    "federation.participation": share,
    "federation.on_bad_client": st.sampled_from(["stop", "skip", "retry"]),
    "data.alpha": positive,
    "data.root": st.none() | st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1),
    "data.fraction": share,
    "data.validation": st.floats(0.0, 0.99),
    "optimizer.name": st.sampled_from(["sgd", "adam", "adamw"]),
    "optimizer.lr": st.floats(0, 1e6),
    "optimizer.clip_norm": st.none() | positive,
    "optimizer.lr_decay": positive,
    "evaluation.models": st.none()
    | st.lists(st.sampled_from(["before", "after", "global", "finetuned"]), unique=True),
    "fabric.devices": st.just("auto") | st.integers(1, 64),
    "fabric.precision": st.sampled_from(["32-true", "64-true", "bf16-mixed"]),
}
METHODS = st.one_of(
    st.sampled_from(["local", "fedavg", "fedper", "fedbn"]),
    st.fixed_dictionaries(
        {"name": st.just("fedprox"), "init_args": st.fixed_dictionaries({"mu": positive})}
    ),
    st.fixed_dictionaries(
        {"name": st.just("fedamp"), "sigma": st.none() | positive, "alpha": positive}
    ),
    st.fixed_dictionaries(
        {
            "name": st.just("kapc"),
            "solver": st.sampled_from(["step", "exact"]),
            "lam": st.floats(0, 1e6),
        }
    ),
)
CALLBACKS = st.fixed_dictionaries(
    {},
    optional={
        "heatmaps": st.none() | st.fixed_dictionaries({"every": st.integers(1, 99)}),
        "quantize": st.fixed_dictionaries({"bits": st.sampled_from([8, 16])}),
        "topk": st.fixed_dictionaries({"share": share}),
        "krum": st.fixed_dictionaries(
            {"attackers": st.integers(0, 99), "keep": st.integers(1, 99)}
        ),
        "attack": st.fixed_dictionaries(
            {"kind": st.just("noise"), "clients": st.lists(st.integers(0, 9))}
        ),
    },
)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("config") / "printed.yaml"


@pytest.mark.slow
@settings(same, max_examples=20)
@given(
    plain=st.fixed_dictionaries({}, optional=PLAIN),
    method=METHODS,
    callbacks=CALLBACKS,
    hidden=st.lists(st.integers(1, 512), min_size=1, max_size=4),
)
def test_a_printed_config_means_the_same(file, plain, method, callbacks, hidden):
    """`--print_config` fed back gives the same config, and prints the same."""
    nested = {
        "method": method,
        "callbacks": callbacks,
        "model": {"name": "mlp", "hidden": hidden},
    }
    for key, value in plain.items():
        group, _, name = key.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    config = resolve([nested])
    text = to_yaml(config)
    file.write_text(text, encoding="utf-8")
    again = resolve(read_config(str(file)))
    assert again == config
    assert to_yaml(again) == text
    for key, value in plain.items():
        if not config.smoke:
            assert _at(config, key) == value


def _at(config, key):
    value = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


# ---------------------------------------------------------------- partitions


@st.composite
def labels(draw, least, most):
    """Labels of up to 12 classes, some of which may be rare or absent."""
    classes = draw(st.integers(1, 12))
    weights = np.array(
        draw(st.lists(st.integers(0, 9), min_size=classes, max_size=classes)), dtype=float
    )
    assume(weights.any())
    size, seed = draw(st.integers(least, most)), draw(st.integers(0, 99))
    return np.random.default_rng(seed).choice(classes, size, p=weights / weights.sum())


def check_deal(train, test, clients, data, seed):
    """Disjoint, complete where the partition deals everything, and nobody has fewer than the
    least."""
    shares = partition.deal(train, test, clients, data, np.random.default_rng(seed))
    needs = (partition.samples_needed(data), 1)
    for part, pool, need in zip(shares, (train, test), needs, strict=True):
        assert len(part) == clients
        dealt = np.concatenate(part)
        assert len(np.unique(dealt)) == len(dealt) <= len(pool)
        assert not len(dealt) or (dealt.min() >= 0 and dealt.max() < len(pool))
        assert min(map(len, part)) >= need
        if data.partition in ("iid", "rotated") or (
            data.partition == "dirichlet" and data.sizes == "free"
        ):
            assert len(dealt) == len(pool)
    left, held = partition.cut_off(shares[0], train, data.validation, np.random.default_rng(seed))
    for whole, a, b in zip(shares[0], left, held, strict=True):
        assert np.array_equal(np.sort(np.concatenate([a, b])), whole)
        assert len(a) >= data.min_samples and (len(b) > 0) == (data.validation > 0)


KINDS = st.one_of(
    st.fixed_dictionaries(
        {
            "by": st.sampled_from(["class", "client"]),
            "sizes": st.sampled_from(["free", "equal"]),
            "alpha": st.floats(-4, 4).map(lambda x: 10.0**x),
        }
    ),
    st.fixed_dictionaries(
        {"partition": st.just("hsu"), "alpha": st.floats(-4, 4).map(lambda x: 10.0**x)}
    ),
    st.fixed_dictionaries(
        {"partition": st.just("pathological"), "classes_per_client": st.integers(1, 5)}
    ),
    st.fixed_dictionaries({"partition": st.sampled_from(["iid", "rotated"])}),
)


@same
@given(
    train=labels(1, 2000),
    test=labels(1, 400),
    clients=st.integers(1, 60),
    kind=KINDS,
    min_samples=st.integers(1, 20),
    validation=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 99),
)
def test_a_partition_is_disjoint_complete_and_fair(
    train,
    test,
    clients,
    kind,
    min_samples,
    validation,
    seed,
):
    data = DataConfig(min_samples=min_samples, validation=validation, **kind)
    enough = len(train) >= clients * partition.samples_needed(data) and len(test) >= clients
    try:
        check_deal(train, test, clients, data, seed)
    except BadInput:
        assert not enough or data.partition == "pathological"
    else:
        assert enough


# ---------------------------------------------------------------- payloads


@st.composite
def tensors(draw, rows=None):
    """Numbers of any size, some of them 0 or equal; with `rows` a matrix."""
    size = draw(st.integers(1, 40))
    scale = draw(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e6, 1e30]))
    shape = (size,) if rows is None else (draw(st.integers(1, rows)), size)
    x = (
        torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
        * scale
    )
    return x.round() if draw(st.booleans()) else x


@same
@given(x=tensors(), bits=st.sampled_from([8, 16]), seed=st.integers(0, 999))
def test_quantisation_comes_back_within_a_step(x, bits, seed):
    """Nothing moves by more than a step of the grid, zeros stay, and the largest comes back as it
    was."""
    back = quantised(x, bits, torch.Generator().manual_seed(seed))
    step = x.abs().max() / (2 ** (bits - 1) - 1)
    assert back.isfinite().all()
    assert ((back - x).abs() <= step * (1 + 1e-4)).all()
    assert (back[x == 0] == 0).all()


@same
@given(x=tensors(), share=st.floats(0.01, 1.0))
def test_the_largest_come_back_and_the_rest_is_zero(x, share):
    count = max(1, round(share * len(x)))
    back = largest(x, count)
    kept = back != 0
    assert int(kept.sum()) <= count and torch.equal(back[kept], x[kept])
    assert kept.all() or float(x[~kept].abs().max()) <= float(
        back.abs().sort(descending=True).values[count - 1]
    )


# ---------------------------------------------------------------- tables


@same
@given(
    rows=st.lists(
        st.dictionaries(
            st.sampled_from("abcdef"), st.integers() | st.floats(allow_nan=False), min_size=1
        ),
        min_size=1,
    )
)
def test_a_table_gives_back_what_was_written(file, rows):
    """Every digit, in as many appends as there are rows, whatever columns come later."""
    table = CsvTable(file.with_name("table.csv"))
    table.path.unlink(missing_ok=True)
    for row in rows:
        table.append([row])
    assert table.read() == rows
