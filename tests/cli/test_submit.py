"""`fl-train submit`: the script it writes, what it refuses, and what it hands to sbatch."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from fl_lightning.foundation.errors import BadInput
from fl_lightning.lab.submit import _seconds, sweep_points

BASE = "submit --config kapc_exact_digits.yaml --time 01:00:00"
ACCEPTS = 'cp "$1" got; echo Submitted batch job 42'


@pytest.fixture
def ask(tmp_path, monkeypatch, fl_train):
    """Runs a line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return fl_train


@pytest.fixture
def shown(ask):
    """Gives the script of a line."""

    def run(line):
        code, out, err = ask(f"{line} --dry-run")
        assert code == 0, err
        return out

    return run


@pytest.fixture
def refused(ask):
    """Runs a line that is refused; gives the one line that says so."""

    def run(line, code=2):
        exit_code, out, err = ask(line)
        assert (exit_code, out, err.count("\n")) == (code, "", 1)
        return err

    return run


def lines_of(text):
    """The words of each run in a script."""
    inside = text.split("RUNS=(\n")[1].split("\n)\n")[0]
    return [shlex.split(shlex.split(line)[0]) for line in inside.splitlines()]


def test_nodes_and_gpus_set_the_fabric(tmp_path, shown):
    text = shown(f"{BASE} --nodes 2 --gpus-per-node 4 --partition main --federation.rounds 3")
    asked = "nodes=2 ntasks-per-node=4 gres=gpu:4 time=01:00:00 partition=main requeue"
    assert all(f"#SBATCH --{word}\n" in text for word in asked.split())
    assert "--fabric.num_nodes 2 --fabric.devices 4" in text and "--array" not in text
    (words,) = lines_of(text)
    assert words[:4] == ["--config", "kapc_exact_digits.yaml", "--federation.rounds", "3"]
    assert words[-2:] == ["--name", "kapc_exact_digits-001"]
    assert words[words.index("--out") + 1] == str(tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []  # nothing was written


def test_the_script_runs_the_line_of_its_task_and_resumes(tmp_path, shown, commands):
    text = shown(f"{BASE} --array 'seed=3,4' --name 'a b'")
    commands(srun="printf '%s\\n' \"$@\" > got")
    env = {**os.environ, "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", "-s"], input=text, text=True, env=env, check=True)
    words = (tmp_path / "got").read_text().splitlines()
    assert words[words.index("--seed") + 1] == "4"
    assert words[-1] == "a b-seed4" and "--resume" in words


def test_cores_memory_and_what_comes_before_the_run(shown, commands):
    setup = "false_positive=$UNSET\nexport SEEN='a b'"
    wishes = f"--cpus-per-task 8 --mem 32G --setup {shlex.quote(setup)}"
    text = shown(f"{BASE} {wishes}")
    assert "#SBATCH --cpus-per-task=8\n" in text and "#SBATCH --mem=32G\n" in text
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=8 " in text
    failing = shown(f"{BASE} --setup 'ls no_such_module'")
    commands(srun='echo "$SEEN" > seen')
    env = {**os.environ, "SLURM_JOB_ID": "7"}
    subprocess.run(["bash"], input=text, text=True, env=env, check=True)
    assert Path("seen").read_text() == "a b\n"
    Path("seen").unlink()
    assert subprocess.run(["bash"], input=failing, text=True, env=env, check=False).returncode != 0
    assert not Path("seen").exists()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("signal, requeued", [("USR1", True), ("TERM", False)])
def test_signals_stop_the_run_and_the_limit_queues_it_again(
    signal, requeued, early, tmp_path, shown, commands
):
    """Also a signal that arrives when the run has begun and the script does not know its process
    yet."""
    text = shown(BASE)
    if early:
        waits = f"while [ ! -e up ]; do sleep 0.01; done; kill -{signal} $$; step=$!"
        text = text.replace("step=$!", waits)
    stopped = "trap 'echo stopped >> said; exit 143' TERM; touch up"
    commands(srun=f"{stopped}; sleep 30 >/dev/null & wait", scontrol='echo "$@" >> said')
    (tmp_path / "job").write_text(text)
    env = {**os.environ, "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "job"], env=env, stdout=subprocess.PIPE, text=True) as job:
        if not early:
            while not (tmp_path / "up").exists():
                assert job.poll() is None
            subprocess.run(["kill", f"-{signal}", str(job.pid)], check=True)
        job.communicate(timeout=60)
    assert job.returncode == (0 if requeued else 143)
    events = ["stopped", "requeue 7"] if requeued else ["stopped"]
    assert (tmp_path / "said").read_text().splitlines() == events


def test_sbatch_gets_the_script(tmp_path, ask, refused, commands):
    commands(sbatch=ACCEPTS)
    code, out, _ = ask(f"{BASE} --nodes 1")
    assert code == 0 and "Submitted batch job 42" in out
    jobs = tmp_path / "runs" / "jobs"
    script = jobs / "kapc_exact_digits-001.sbatch"
    assert script.read_text() == (tmp_path / "got").read_text()
    commands(sbatch="echo no such partition >&2; exit 1")
    assert "no such partition" in refused(f"{BASE} --partition nowhere --name b")
    assert not (jobs / "b.sbatch").exists()
    commands(sbatch="echo Unable to contact slurm controller >&2; exit 1")
    assert "did not reach SLURM" in refused(f"{BASE} --name b", code=1)


REFUSED = {
    "--time soon": "time",
    "--time 00:01:00": "warning=120.*shorter than the time limit, 60 s",
    "--time 0-1:00 --warning 3600": "time limit, 3600 s",
    "--nodes 0": "nodes",
    "--nodes 11": "at most one process for each client",
    "--nodes 4 --gpus-per-node 4": "at most one process for each client",
    "--cpus-per-task 0": "cpus_per_task",
    "--mem 3TB": "mem='3TB': it must be SLURM's",
    "--setup 'if true'": "setup='if true': ",
    "--array seed": "array",
    "--array 'data.root=a/x,a_x' --data.source digits": "two runs would be called",
    "--fabric.devices 4": "fabric.devices",
    "--sbatch --dry-run": "sbatch: it needs a value",
    "--method fedavg --callbacks krum --callbacks.krum.attackers 5": "callbacks.krum.attackers=5",
    "--callbacks attack --callbacks.attack.kind noise": "give exactly one of clients and share",
    "--callbacks topk,quantize": "it cannot run with quantize",
    "--method ditto --callbacks layerselection": "callbacks.layerselection",
    "--callbacks wireless --callbacks.wireless.near 500": "callbacks.wireless.far=289",
    "--method fedmd": "data.public",
    "--method fedavg --evaluation.judge finetuned --optimizer.privacy.noise 1 "
    "--optimizer.privacy.clip 1": "fine-tuned",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_no_job_or_run_begins_with_is_refused(words, refused, tmp_path):
    assert re.search(REFUSED[words], refused(f"{BASE} {words}"))
    assert list(tmp_path.iterdir()) == []


def test_without_slurm_it_says_so(tmp_path, refused, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch" in refused(BASE)


def test_points_of_a_sweep():
    assert sweep_points(None) == [{}]
    assert sweep_points("a=1-3") == [{"a": "1"}, {"a": "2"}, {"a": "3"}]
    assert sweep_points("a=x,y b=2") == [{"a": "x", "b": "2"}, {"a": "y", "b": "2"}]
    for bad in ("a", "a=", "a=1 a=2", "=3", "a=0-2000"):
        with pytest.raises(BadInput):
            sweep_points(bad)


def test_a_job_wants_a_config(refused):
    """It resumes its run from the first start on, and no run starts so without one."""
    words = "submit --method fedavg --time 01:00:00 --dry-run"
    assert "config=None:" in refused(words)


@pytest.mark.parametrize(
    "sweep, names",
    [
        ("seed=3,4 method.lam=1", ["kapc_exact_digits-seed3-lam1", "kapc_exact_digits-seed4-lam1"]),
        ("method=fedavg,kapc", ["fedavg-digits-seed0", "kapc_exact_digits-seed0"]),
    ],
)
def test_runs_of_a_sweep_have_names_to_read(sweep, names, shown):
    text = shown(f"{BASE} --array '{sweep}'")
    assert "#SBATCH --array=0-1\n" in text
    assert [words[-1] for words in lines_of(text)] == names


def test_the_warning_comes_within_the_limit(shown):
    """In all of SLURM's ways to write a time; a limit of 0 is none."""
    times = {"3": 180, "3:20": 200, "1:00:05": 3605, "1-2": 93600, "1-2:03": 93780}
    assert {time: _seconds(time) for time in times} == times
    for time in "30":
        shown(f"submit --config kapc_exact_digits.yaml --time {time}")


def test_names_are_not_given_twice(ask, refused, commands):
    """A name is taken as soon as a job has it, long before the job makes its folder."""
    answer = "echo x >> jobs; echo Submitted batch job $((10 + $(wc -l < jobs)))"
    waits = "for j in 11 12 13 14_0; do echo $j PENDING Priority; done"
    commands(sbatch=answer, squeue=waits)
    for words in ("", "--seed 1", "--name a", "--name b --array seed=0,1"):
        assert ask(f"{BASE} {words}")[0] == 0
    names = {file.stem for file in Path("runs/jobs").glob("kapc*.sbatch")}
    assert names == {"kapc_exact_digits-001", "kapc_exact_digits-002"}
    # What was named is submitted again once its job is gone, not before; nor a run that a sweep has
    # already.
    taken = {"a": "a", "b --array seed=0-2": "b-seed0", "b-seed0": "b-seed0"}
    for words, name in taken.items():
        line = f"name='{name}': a job in SLURM's queue trains this run"
        assert line in refused(f"{BASE} --name {words}")
    commands(squeue="")
    assert ask(f"{BASE} --name a")[0] == 0


def test_blanks_and_quotes_reach_sbatch(tmp_path, shown):
    further = """'"--comment=two #words" --qos=low -A "my group"'"""
    text = shown(f"""{BASE} --name 'a "b' --out 'my runs' --sbatch {further}""")
    assert '#SBATCH --job-name="a \\"b"\n' in text
    assert f'#SBATCH --output="{tmp_path}/my runs/jobs/%x-%j.out"\n' in text
    assert '#SBATCH --comment="two #words"\n#SBATCH --qos=low\n' in text
    assert '#SBATCH "my group"\n' in text


def test_what_is_not_here_is_not_wanted(shown):
    """Data and files of the nodes; callbacks are built all the same, and those of one's own do
    nothing yet."""
    line = "submit --config kapc_mnist.yaml --time 01:00:00 --data.root /nowhere"
    assert "--data.root /nowhere" in shown(line)
    shown(f"{BASE} --model.weights /nowhere/model.safetensors")
    own = "from fl_lightning.callbacks import Observer\nclass Far(Observer):\n"
    Path("fl_own_far.py").write_text(f"{own}    def on_fit_start(self, run):\n        1 / 0\n")
    shown(f"{BASE} --callbacks fl_own_far.Far")
