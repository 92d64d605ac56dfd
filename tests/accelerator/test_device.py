"""What must hold on whatever accelerator there is (see conftest.py): the numbers of the CPU, by
every path."""

import gc

import cases
import pytest
import torch
from golden import SINGLE, numbers
from lines import run_line

from fl_lightning.callbacks.checkpoint import Checkpoint, restore
from fl_lightning.engine.federation import Federation
from fl_lightning.foundation.device import module_of, wide
from fl_lightning.foundation.parallel import fabric_of
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.opening import config_of
from fl_lightning.run import assemble

GOLDEN = {name: run for name, run in cases.runs().items() if run.ranks == 1}


def close(here, there, tolerance):
    """Which columns of two runs differ by more than `tolerance`, relative to 1 + their size."""
    assert here.keys() == there.keys()
    return [
        name
        for name, values in here.items()
        if values != there[name]
        and not all(
            isinstance(a, float | int) and abs(a - b) <= tolerance * (1 + abs(a))
            for a, b in zip(values, there[name], strict=True)
        )
    ]


@pytest.mark.sampled("[scaffold-host]")
@pytest.mark.parametrize("name", GOLDEN)
def test_every_method_executor_bank_and_callback_gives_the_numbers_of_the_cpu(name, device):
    """The golden runs, among them those that are interrupted and taken up again, and those whose
    clients fail."""
    found = []
    exact = wide(torch.device(device)) == torch.float64
    for accelerator in ("cpu", device):
        fabric = {"accelerator": accelerator} | ({} if exact else {"precision": "32-true"})
        run = cases.Run(
            cases.merged(GOLDEN[name].settings, {"fabric": fabric}),
            interrupted=GOLDEN[name].interrupted,
        )
        found.append(numbers([name], {name: run})[name])
    single = not exact or name.endswith("-32")
    elsewhere = SINGLE if GOLDEN[name].single else 1e-8
    assert close(*found, 1e-3 if single else elsewhere) == []


@pytest.mark.slow
@pytest.mark.parametrize("to_device", [True, False])
def test_a_run_goes_on_on_another_kind_of_device(fit, device, to_device):
    first, second = ("cpu", device) if to_device else (device, "cpu")
    begun = fit(
        "a", f"--fabric.accelerator {first} --federation.rounds 2", "--callbacks checkpoint"
    )
    models = {}
    for kind in (first, second):
        fabric = fabric_of(kind, "32-true")
        fabric.launch()
        fed = assemble(fabric, config_of(begun), begun, [Checkpoint()])
        assert restore(fed.run, begun / "checkpoints") == 2
        assert all(
            v.device.type == kind for s in fed.run.states.values() for v in s.vectors.values()
        )
        models[kind] = {c: state.vectors["model"].cpu() for c, state in fed.run.states.items()}
    assert models[first].keys() == models[second].keys() == set(range(4))
    assert all(torch.equal(models[first][c], models[second][c]) for c in models[first])
    moved = fit(
        "a",
        f"--fabric.accelerator {second} --federation.rounds 3 --resume",
        "--callbacks checkpoint",
    )
    stayed = fit("b", f"--fabric.accelerator {first} --federation.rounds 3")
    one, other = (RunFolder(folder).read("metrics")[-1] for folder in (stayed, moved))
    for name in ("train_loss", "coaching_loss"):
        assert other[name] == pytest.approx(one[name], rel=1e-3)


SETTINGS = {
    "mlp": "--optimizer.momentum 0.9 --optimizer.keep_state true",
    "cnn": "--model cnn --model.padding 2 --optimizer.weight_decay 0.001 "
    "--federation.participation "
    "0.6",
    "decay": "--method fedprox --optimizer.lr_decay 0.5 --optimizer.clip_norm 1.0",
    "normed": "--model cases.Small",
}


@pytest.mark.sampled("[mlp]")
@pytest.mark.parametrize("flags", SETTINGS.values(), ids=SETTINGS)
def test_executors_agree_with_the_loop(fit, flags, device, capsys):
    """In 64 bits, where rounding cannot grow in two rounds; batches of several sizes among them."""
    if wide(torch.device(device)) != torch.float64:
        pytest.skip(f"{device} has no 64 bits")
    common = (
        f"{flags} --fabric.accelerator {device} --fabric.precision 64-true --federation.rounds 2"
    )
    rows = {}
    for name in ("loop", "vmap"):
        rows[name] = RunFolder(fit(name, f"{common} --fabric.executor {name}")).read("metrics")
        refuses = "Small" in flags and name == "vmap"  # BatchNorm mixes the samples of a batch
        assert ("trains in the loop" in capsys.readouterr().err) == refuses
        for a, b in zip(rows["loop"], rows[name], strict=True):
            for column in ("train_loss", "coaching_loss", "mean_accuracy"):
                assert b[column] == pytest.approx(a[column], abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--fabric.executor vmap --federation.participation 0.6",
        "--model cases.Lit --optimizer.name module",
    ],
    ids=["stacked", "dropout"],
)
def test_a_run_repeats_itself_when_resumed(fit, device, flags):
    """Dropout is drawn from the device's own generator, whatever was drawn before."""
    flags += f" --fabric.accelerator {device} --fabric.deterministic true --callbacks checkpoint"
    whole = fit("whole", flags, "--federation.rounds 4")
    torch.rand(3, device=device)
    fit("parts", flags, "--federation.rounds 2")
    parts = fit("parts", flags, "--federation.rounds 4 --resume")
    assert lasting(parts) == lasting(whole)


def lasting(folder):
    """The rows of metrics.csv without what says something of the machine."""
    rows = RunFolder(folder).read("metrics")
    return [
        {k: v for k, v in row.items() if not k.startswith(("seconds", "memory"))} for row in rows
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--fabric.executor vmap",
        "--callbacks quantize --optimizer.keep_state true",
        "--optimizer.momentum 0",
    ],
    ids=["plain", "vmap", "quantized", "still"],
)
def test_no_number_depends_on_where_models_lie(fit, device, flags):
    """Fetched on a stream of their own while the client before trains, and written back behind
    it."""
    common = (
        f"--fabric.accelerator {device} --federation.participation 0.75 --optimizer.momentum 0.5 "
        f"{flags}"
    )
    whole = fit("memory", common, "--federation.rounds 2")
    for bank in ("host", "disk"):
        assert lasting(fit(bank, common, f"--federation.rounds 2 --fabric.bank {bank}")) == lasting(
            whole
        )


@pytest.mark.slow
def test_models_away_take_no_memory_of_the_device(fit, device):
    """20 models of 4.5 MB and what they hear: 180 MB in memory, four rows where they lie on the
    host."""
    module = module_of(torch.device(device))
    if not hasattr(module, "reset_peak_memory_stats"):
        pytest.skip(f"{device} does not count its memory")
    flags = (
        f"--fabric.accelerator {device} --federation.clients 20 --data.min_samples 1 --data.alpha "
        f"100"
    )
    flags += " --model.hidden [2000,500] --federation.local_epochs 0 --federation.rounds 1"
    peak = {}
    for bank in ("host", "memory"):
        gc.collect()  # what runs before have left in cycles would go in the midst of this one
        module.empty_cache()
        module.reset_peak_memory_stats()
        before = module.max_memory_allocated()
        fit(bank, flags, f"--fabric.bank {bank}")
        peak[bank] = (module.max_memory_allocated() - before) / 2**20
    assert peak["memory"] - peak["host"] > 100, peak


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_precisions_come_near_32_bits(fit, device, precision):
    if precision == "64-true" and wide(torch.device(device)) != torch.float64:
        pytest.skip(f"{device} has no 64 bits")
    flags = (
        f"--model cnn --model.padding 2 --fabric.accelerator {device} --federation.rounds 1 "
        f"--data.fraction 0.1"
    )
    losses = [
        RunFolder(fit(name, flags, f"--fabric.precision {kind}")).read("metrics")[0]
        for name, kind in (("a", precision), ("b", "32-true"))
    ]
    assert losses[1]["train_loss"] == pytest.approx(losses[0]["train_loss"], rel=0.05)


@pytest.mark.slow
def test_a_deterministic_run_repeats_its_own_bits(fit, device, monkeypatch):
    """And torch is told so while it lasts."""
    seen = []
    real = Federation.round

    def told(self, t, *args):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return real(self, t, *args)

    monkeypatch.setattr(Federation, "round", told)
    flags = (
        f"--method fedproto --fabric.accelerator {device} --federation.rounds 2 --data.fraction 0.2"
    )
    a, b = (fit(name, flags, "--fabric.deterministic true") for name in "ab")
    assert lasting(a) == lasting(b)
    fit("c", flags)
    assert seen == [True] * 4 + [False] * 2


@pytest.mark.slow
def test_a_model_that_is_too_large_for_the_device_ends_in_one_line(fit, device, capsys):
    """Of 128 MiB: a layer of 10^5 numbers for each of 360 samples takes more."""
    line = (
        f"--config kapc_exact_digits --name big --loggers null --callbacks null "
        f"--fabric.accelerator {device}"
    )
    line += (
        " --model.hidden [100000] --federation.clients 4 --federation.batch_size 100000 "
        "--federation.rounds 1"
    )
    module = module_of(torch.device(device))
    if not hasattr(module, "set_per_process_memory_fraction"):
        pytest.skip(f"{device} has no limit for its memory")
    gc.collect()
    module.empty_cache()
    module.set_per_process_memory_fraction(2.0**27 / module.mem_get_info()[1])
    try:
        assert run_line(f"fit {line}") in (1, 2)
    finally:
        module.set_per_process_memory_fraction(1.0)
    err = capsys.readouterr().err.strip().splitlines()
    assert err[-1].startswith("fl-train: error:") and "out of memory" in err[-1]
