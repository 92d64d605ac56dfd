import errno
from pathlib import Path

import pytest
import yaml
from lines import run_line

from fl_lightning.cli import main


def test_print_config_prints_and_does_nothing_else(engine, capsys):
    assert run_line("fit --config kapc_exact_digits --print_config --method.lam 3") == 0
    assert yaml.safe_load(capsys.readouterr().out)["method"]["init_args"]["lam"] == 3
    assert not engine.calls
    assert not Path("runs").exists()


def test_the_engine_gets_the_resolved_config(engine):
    assert run_line("fit --config kapc_mnist --method fedprox --smoke") == 0
    ((config, folder, resume),) = engine.calls
    assert config.method.class_path == "fl_lightning.methods.fedprox.FedProx"
    assert config.method.init_args == {"mu": 0.01}
    assert (folder, resume, config.smoke) == (Path("runs/kapc_mnist-001"), False, True)


def test_test_and_export_of_what_is_no_run(refused):
    assert refused("test").startswith("run: ")
    assert refused("test --run nowhere").startswith("run='nowhere'")
    assert refused("export --run nowhere --client 0 --out m.safetensors").startswith(
        "run='nowhere'"
    )


def test_test_cannot_change_the_run(engine, refused):
    assert run_line("fit --config kapc_exact_digits --name a") == 0
    assert refused("test --run runs/a --data.alpha 1").startswith("data.alpha='1'")


def test_an_export_that_the_disk_refuses_can_be_repeated(engine, monkeypatch, capsys):
    assert run_line("fit --config kapc_exact_digits --name a") == 0
    out = Path("m.safetensors")
    monkeypatch.setattr(
        engine, "export", lambda *a, export=engine.export: (out.touch(), export(*a))[1]
    )
    line = ["export", "--run", "runs/a", "--client", "3", "--out", str(out)]
    before = sorted(Path().iterdir())

    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("fl_lightning.foundation.files.os.replace", full)
        assert main(line) == 1
    assert (
        capsys.readouterr().err == "fl-train: error: cannot write m.py: No space left on device\n"
    )
    assert sorted(Path().iterdir()) == before
    assert main(line) == 0


def test_what_loads_an_exported_model_can_be_imported(engine, capfd, refused):
    assert run_line("fit --config kapc_exact_digits --name a") == 0
    assert run_line("export --run runs/a --client 3 --out 1-st.safetensors") == 0
    assert "from _1_st import predict" in capfd.readouterr().out and Path("_1_st.py").is_file()
    error = refused("export --run runs/a --client 3 --out torch.safetensors")
    assert error.startswith("out='torch.safetensors'") and "hide the module torch" in error


@pytest.mark.parametrize(
    "flags, told",
    {
        "--format tar --client 0": "format='tar'",
        "--client 0 --out no/m.safetensors": "out=",
        "": "client: it must be given",
    }.items(),
)
def test_bad_exports(engine, refused, flags, told):
    assert run_line("fit --config kapc_exact_digits --name a") == 0
    assert refused(f"export --run runs/a --out m.safetensors {flags}").startswith(told)
