"""The pretended device is as strict as a GPU, and a run on it ends as one whose device is lost or
full."""

import pytest
from pretended import STATE
from touchy import Body

from fl_lightning.cli import main

pytestmark = pytest.mark.usefixtures("only_pretended")

# ---------------------------------------------------------------- a device that fails


@pytest.mark.sampled("[skip]")
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_device_that_is_lost_ends_the_run_and_no_client_is_blamed(
    policy, device, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Body, "touch", lose)
    line = (
        f"fit --config kapc_exact_digits --name lost --loggers null --callbacks null "
        f"--fabric.accelerator {device}"
    )
    line += f" --model touchy.Body --federation.on_bad_client {policy} --data.fraction 0.1"
    assert main(line.split()) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the device pretended:0 failed in round" in said and "illegal memory access" in said
    assert "more lines" not in said and not (tmp_path / "runs" / "lost" / "failures.csv").exists()


def lose(self, x):
    STATE.dead = self.training and len(x) > 2  # not while operations are counted
    return x
