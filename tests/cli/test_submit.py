"""`fl-train submit`: the script it writes, what it refuses, and what it hands to sbatch."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from fl_lightning.cli import main
from fl_lightning.foundation.errors import BadInput
from fl_lightning.lab.submit import _seconds, grid

BASE = "submit --config kapc_exact_digits.yaml --time 01:00:00"


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main([*shlex.split(words), "--dry-run"]) == 0
    return capsys.readouterr().out


def lines_of(text: str) -> list[list[str]]:
    """The words of each run in a script."""
    inside = text.split("RUNS=(\n")[1].split("\n)\n")[0]
    return [shlex.split(shlex.split(line)[0]) for line in inside.splitlines()]


def test_nodes_and_gpus_set_the_fabric(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    text = shown(
        f"{BASE} --nodes 2 --gpus-per-node 4 --partition main --federation.rounds 3", capsys
    )
    for word in (
        "nodes=2",
        "ntasks-per-node=4",
        "gres=gpu:4",
        "time=01:00:00",
        "partition=main",
        "requeue",
    ):
        assert f"#SBATCH --{word}\n" in text
    assert "--fabric.num_nodes 2 --fabric.devices 4" in text
    (words,) = lines_of(text)
    assert words[:4] == ["--config", "kapc_exact_digits.yaml", "--federation.rounds", "3"]
    assert words[-2:] == ["--name", "kapc_exact_digits-001"]
    assert words[words.index("--out") + 1] == str(tmp_path / "runs")
    assert "--array" not in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert not (tmp_path / "runs").exists()  # nothing was written


def test_a_sweep_is_an_array_with_a_folder_for_each_run(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    text = shown(f"{BASE} --array 'seed=0-2 method.lam=0.05,1'", capsys)
    assert "#SBATCH --array=0-5\n" in text
    assert '#SBATCH --job-name="kapc_exact_digits-6-runs"\n' in text
    runs = lines_of(text)
    assert len({words[-1] for words in runs}) == 6
    assert runs[1][-1] == "kapc_exact_digits-seed0-lam1"
    assert [words[words.index("--seed") + 1] for words in runs] == ["0", "0", "1", "1", "2", "2"]


def test_the_script_runs_the_line_of_its_task_and_resumes(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    text = shown(f"{BASE} --array 'seed=3,4' --name 'a b'", capsys)
    (tmp_path / "srun").write_text("#!/bin/bash\nprintf '%s\\n' \"$@\" > said\n")
    (tmp_path / "srun").chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_JOB_ID": "7",
    }
    assert (
        subprocess.run(["bash", "-s"], input=text, text=True, env=env, check=False).returncode == 0
    )
    said = (tmp_path / "said").read_text().splitlines()
    assert said[said.index("--seed") + 1] == "4"
    assert said[-1] == "a b-seed4"
    assert "--resume" in said


def test_cores_memory_and_what_comes_before_the_run(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    setup = "false_positive=$UNSET\nexport SEEN='a b'"
    wishes = f"--cpus-per-task 8 --mem 32G --setup {shlex.quote(setup)}"
    text = shown(f"{BASE} {wishes}", capsys)
    assert "#SBATCH --cpus-per-task=8\n" in text and "#SBATCH --mem=32G\n" in text
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=8 " in text
    (tmp_path / "srun").write_text('#!/bin/bash\necho "$SEEN" > seen\n')
    (tmp_path / "srun").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash"], input=text, text=True, env=env, check=False).returncode == 0
    assert (tmp_path / "seen").read_text() == "a b\n"
    failing = shown(f"{BASE} --setup 'ls no_such_module'", capsys)
    (tmp_path / "seen").unlink()
    assert subprocess.run(["bash"], input=failing, text=True, env=env, check=False).returncode != 0
    assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("signal", "requeued"), [("USR1", True), ("TERM", False)])
def test_signals_stop_the_run_and_the_limit_queues_it_again(
    signal: str, requeued: bool, early: bool, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Also a signal that arrives when the run has begun and the script does not know its process
    yet."""
    monkeypatch.chdir(tmp_path)
    text = shown(BASE, capsys)
    if early:
        text = text.replace(
            "step=$!", f"while [ ! -e up ]; do sleep 0.01; done; kill -{signal} $$; step=$!"
        )
    (tmp_path / "srun").write_text(
        "#!/bin/bash\ntrap 'echo stopped >> said; exit 143' TERM\ntouch up\nsleep 30 >/dev/null & "
        "wait\n"
    )
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@" >> said\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(stat.S_IRWXU)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    (tmp_path / "job").write_text(text)
    with subprocess.Popen(["bash", "job"], env=env, stdout=subprocess.PIPE, text=True) as job:
        if not early:
            while not (tmp_path / "up").exists():
                assert job.poll() is None
            subprocess.run(["kill", f"-{signal}", str(job.pid)], check=True)
        job.communicate(timeout=20)
    assert job.returncode == (0 if requeued else 143)
    assert (tmp_path / "said").read_text().splitlines() == [
        "stopped",
        *(["requeue 7"] if requeued else []),
    ]


def test_sbatch_gets_the_script(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sbatch").write_text('#!/bin/bash\ncp "$1" got; echo Submitted batch job 42\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(shlex.split(f"{BASE} --nodes 1")) == 0
    out = capsys.readouterr().out
    assert "Submitted batch job 42" in out
    file = tmp_path / "runs" / "jobs" / "kapc_exact_digits-001.sbatch"
    assert file.read_text() == (tmp_path / "got").read_text()
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho no such partition >&2; exit 1\n")
    assert main(shlex.split(f"{BASE} --partition nowhere --name b")) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "nowhere" in err and "no such partition" in err
    assert not (tmp_path / "runs" / "jobs" / "b.sbatch").exists()
    (tmp_path / "sbatch").write_text(
        "#!/bin/bash\necho Unable to contact slurm controller >&2; exit 1\n"
    )
    assert main(shlex.split(f"{BASE} --name b")) == 1
    assert "did not reach SLURM" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpus-per-node 8", "no node has more than 4"),
        ("--nodes 4", "at most the 3"),
        ("--nodes 2 --gpus-per-node 3", "at most the 1 that there are with 3 GPUs"),
    ],
)
def test_gpus_that_no_node_has(words: str, said: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sinfo").write_text(
        "#!/bin/bash\necho 'a gpu:h200:4(S:0)'; echo 'b gpu:2'; echo 'c (null)'\n"
    )
    (tmp_path / "sbatch").write_text("#!/bin/bash\nexit 0\n")
    for name in ("sinfo", "sbatch"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(shlex.split(f"{BASE} {words}")) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sbatch").write_text("#!/bin/bash\nexit 0\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "jobs").write_text("no folder")
    assert main(shlex.split(BASE)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "cannot be written" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--time soon", "time"),
        (
            "--time 00:01:00",
            "warning: 120 is not allowed; it must be shorter than the time limit, 60 s",
        ),
        ("--time 1 --warning 60", "time limit, 60 s"),
        ("--time 0-1:00 --warning 3600", "time limit, 3600 s"),
        ("--time 01:00:00 --nodes 0", "nodes"),
        ("--time 01:00:00 --nodes 11", "at most one for each of 10 clients"),
        ("--time 01:00:00 --nodes 4 --gpus-per-node 4", "at most one for each of 10 clients"),
        ("--time 01:00:00 --cpus-per-task 0", "cpus_per_task"),
        ("--time 01:00:00 --mem 3TB", "mem: '3TB' is not allowed; it must be SLURM's"),
        ("--time 01:00:00 --setup 'if true'", "setup: 'if true' is not allowed"),
        ("--time 01:00:00 --array seed", "array"),
        ("--time 01:00:00 --fabric.devices 4", "fabric.devices"),
        ("--time 01:00:00 --federation.rounds x", "federation.rounds"),
        ("--time 01:00:00 --method nosuch", "nosuch"),
        ("", "time"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    words: str, said: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(f"submit --config kapc_exact_digits.yaml {words}")) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_without_slurm_it_says_so(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(shlex.split(BASE)) == 2
    assert "sbatch" in capsys.readouterr().err


def test_points_of_a_sweep() -> None:
    assert grid(None) == [{}]
    assert grid("a=1-3") == [{"a": "1"}, {"a": "2"}, {"a": "3"}]
    assert grid("a=x,y b=2") == [{"a": "x", "b": "2"}, {"a": "y", "b": "2"}]
    for bad in ("a", "a=", "a=1 a=2", "=3", "a=0-2000"):
        with pytest.raises(BadInput):
            grid(bad)


def test_a_job_wants_a_config(tmp_path: Path, monkeypatch, capsys) -> None:
    """It resumes its run from the first start on, and no run starts so without one."""
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split("submit --method fedavg --time 01:00:00 --dry-run")) == 2
    assert "config: None is not allowed" in capsys.readouterr().err
    shown("submit --config=kapc_exact_digits --time 01:00:00", capsys)


@pytest.mark.parametrize(
    ("sweep", "names"),
    [
        (
            "seed=3,4 evaluation.judge=after",
            ["kapc_exact_digits-seed3-judge-after", "kapc_exact_digits-seed4-judge-after"],
        ),
        ("method=fedavg,kapc", ["fedavg-digits-seed0", "kapc_exact_digits-seed0"]),
    ],
)
def test_runs_of_a_sweep_have_names_to_read(
    sweep: str, names: list[str], tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [words[-1] for words in lines_of(shown(f"{BASE} --array '{sweep}'", capsys))] == names


def test_two_runs_of_one_name_are_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main([*shlex.split(f"{BASE} --array 'data.root=a/x,a_x'"), "--data.source", "digits"]) == 2
    )
    assert "two of its runs would be called" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", ["--sbatch '--mail-type=END --exclusive'", "--sbatch='--mail-type=END --exclusive'"]
)
def test_further_words_for_sbatch(given: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    text = shown(f"{BASE} {given} --seed 3", capsys)
    assert "#SBATCH --mail-type=END\n#SBATCH --exclusive\n" in text
    assert "kapc_exact_digits-001" in text
    assert main(shlex.split(f"{BASE} --sbatch --dry-run")) == 2  # a key of ours is no value
    assert "sbatch: it needs a value" in capsys.readouterr().err


def test_the_warning_comes_within_the_limit(tmp_path: Path, monkeypatch, capsys) -> None:
    """In all of SLURM's ways to write a time; a limit of 0 is none."""
    monkeypatch.chdir(tmp_path)
    forms = {
        "3": 180,
        "3:20": 200,
        "1:00:05": 3605,
        "1-2": 93600,
        "1-2:03": 93780,
        "1-02:03:04": 93784,
    }
    assert {time: _seconds(time) for time in forms} == forms
    shown("submit --config kapc_exact_digits.yaml --time 3", capsys)
    shown("submit --config kapc_exact_digits.yaml --time 0", capsys)


def test_names_are_not_given_twice(tmp_path: Path, monkeypatch, capsys) -> None:
    """A name is taken as soon as a job has it, long before the job makes its folder."""
    monkeypatch.chdir(tmp_path)
    answer = "#!/bin/bash\necho x >> jobs; echo Submitted batch job $((10 + $(wc -l < jobs)))\n"
    waits = "#!/bin/bash\nfor j in 11 12 13 14_0; do echo $j PENDING Priority; done\n"
    for name, text in {"sbatch": answer, "squeue": waits, "sinfo": "#!/bin/bash\nexit 1\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for words in ("", "--seed 1"):
        assert main(shlex.split(f"{BASE} {words}")) == 0
    scripts = sorted((tmp_path / "runs" / "jobs").glob("*.sbatch"))
    assert [file.stem for file in scripts] == ["kapc_exact_digits-001", "kapc_exact_digits-002"]
    assert "--seed 1" in scripts[1].read_text() and "--seed" not in scripts[0].read_text()

    # What was named is submitted again once its job is gone, not before; nor a run that a sweep has
    # already.
    for words in ("--name a", "--name b --array seed=0,1"):
        assert main(shlex.split(f"{BASE} {words}")) == 0
    capsys.readouterr()
    for words, name in (
        ("--name a", "a"),
        ("--name b --array seed=0-2", "b-seed0"),
        ("--name b-seed0", "b-seed0"),
    ):
        assert main(shlex.split(f"{BASE} {words}")) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert f"name: '{name}' is not allowed; SLURM has a job that is to do this run" in err
    (tmp_path / "squeue").write_text("#!/bin/bash\n")
    assert main(shlex.split(f"{BASE} --name a")) == 0


def test_blanks_and_quotes_reach_sbatch(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = """--name 'a "b' --out 'my runs' --sbatch '"--comment=two #words" --qos=low -A "my group"'"""
    text = shown(f"{BASE} {words}", capsys)
    assert '#SBATCH --job-name="a \\"b"\n' in text
    assert f'#SBATCH --output="{tmp_path}/my runs/jobs/%x-%j.out"\n' in text
    assert '#SBATCH --comment="two #words"\n#SBATCH --qos=low\n' in text
    assert '#SBATCH "my group"\n' in text


REFUSED = {
    "--method fedavg --callbacks krum --callbacks.krum.attackers 5": "callbacks.krum.attackers: 5",
    "--callbacks attack --callbacks.attack.kind sign_flip": "either clients or share says who "
    "attacks",
    "--callbacks topk,quantize": "it excludes quantize",
    "--method ditto --callbacks layerselection": "callbacks.layerselection",
    "--callbacks wireless --callbacks.wireless.near 500": "callbacks.wireless.far: 289",
    "--method fedmd": "data.public",
    "--method fedavg --evaluation.judge finetuned --optimizer.privacy.noise 1 "
    "--optimizer.privacy.clip 1": "fine-tuned",
}


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.parametrize("command", [f"{BASE} --dry-run", "plan --config kapc_exact_digits.yaml"])
def test_what_no_run_begins_with_is_refused(
    command: str, words: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(f"{command} {words}")) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert REFUSED[words] in err
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_here_is_not_wanted(tmp_path: Path, monkeypatch, capsys) -> None:
    """Data and files of the nodes; callbacks are built all the same, and those of one's own do
    nothing yet."""
    monkeypatch.chdir(tmp_path)
    line = "submit --config kapc_mnist.yaml --time 01:00:00 --data.root /nowhere"
    assert "--data.root /nowhere" in shown(line, capsys)
    assert (
        main(shlex.split(f"{line} --callbacks attack --callbacks.attack.kind noise --dry-run")) == 2
    )
    assert "either clients or share" in capsys.readouterr().err
    shown(f"{BASE} --model.weights /nowhere/model.safetensors", capsys)
    own = "from fl_lightning.callbacks import Observer\nclass Far(Observer):\n"
    (tmp_path / "fl_own_far.py").write_text(
        own + "    def on_fit_start(self, run):\n        1 / 0\n"
    )
    shown(f"{BASE} --callbacks fl_own_far.Far", capsys)
    shown(f"{BASE} --array 'seed=0-4 method.lam=0.05,1' --loggers wandb", capsys)
