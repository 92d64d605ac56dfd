"""The server optimiser of docs/add-a-method.md is FedAvgM, and FedAvg without momentum; a stop
changes nothing."""

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from fl_lightning.cli import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add-a-method.md"
SMALL = (
    "--config kapc_digits --federation.local_epochs 1 --loggers null --callbacks checkpoint "
    "--evaluation.judge global"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    [text] = re.findall(r"```python\n# my_server\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_server.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_server", None)


def model(name, flags, *more):
    for each in (flags, *more):
        assert main(["fit", *f"{SMALL} --name {name} {each}".split()]) == 0
    assert (
        main(["export", "--run", f"runs/{name}", "--client", "0", "--out", f"{name}.safetensors"])
        == 0
    )
    return load_file(f"{name}.safetensors")


@pytest.mark.slow
def test_the_pages_optimiser(folder):
    rounds = "--federation.rounds 3"
    ours = model("ours", f"--method my_server.Momentum --method.beta 0.5 {rounds}")
    shipped = model("shipped", f"--method fedavgm --method.momentum 0.5 {rounds}")
    none, fedavg = (
        model("none", f"--method my_server.Momentum --method.beta 0 {rounds}"),
        model("avg", f"--method fedavg {rounds}"),
    )
    for name, tensor in shipped.items():
        assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
        assert_close(none[name], fedavg[name], rtol=1e-4, atol=1e-5)
    assert any((ours[name] - fedavg[name]).abs().max() > 1e-3 for name in ours)
    begin = "--method my_server.Momentum --method.beta 0.5 --callbacks.checkpoint.seconds 0"
    parts = model(
        "parts", f"{begin} --federation.rounds 2", f"{begin} --federation.rounds 3 --resume"
    )
    assert all(torch.equal(parts[name], tensor) for name, tensor in ours.items())
