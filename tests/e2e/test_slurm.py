"""On a real SLURM cluster: what a job computes, arrays, limits, preemption.

The cluster is started by the script that FL_SLURM names, or `shared/slurm/slurm-up.sh` beside the
project; it stands on this machine, with two virtual nodes and the partitions `main` and `urgent`,
whose jobs preempt those of `main`.
"""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from lines import run_line

from fl_lightning.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.alone]

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "slurm" / "slurm-up.sh"
SCRIPT = Path(os.environ.get("FL_SLURM", BESIDE))
PATIENCE = 900.0  # seconds; importing alone takes 20 on a busy machine
SLOW = "--model fl_own_models.Slow --model.seconds 0.1 --federation.rounds 8"


def _said(*words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout if done.returncode == 0 else ""


@pytest.fixture(scope="session")
def cluster():
    """The cluster's SLURM_CONF; it is stopped at the end if it was started here."""
    if not SCRIPT.is_file():
        pytest.skip("no SLURM cluster: FL_SLURM names no script that starts one")
    if os.geteuid():
        pytest.skip("no SLURM cluster: starting one takes root")
    stood = Path("/tmp/slurm/run/slurmctld.pid").exists()
    try:
        started = subprocess.run(
            ["bash", SCRIPT], capture_output=True, text=True, timeout=180, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no SLURM cluster: {SCRIPT.name} failed ({type(error).__name__})")
    if started.returncode or not started.stdout.strip():
        pytest.skip(f"no SLURM cluster: {SCRIPT.name} failed: {started.stderr.strip()[-200:]}")
    yield started.stdout.split()[-1]
    if not stood:
        subprocess.run(
            ["bash", SCRIPT.with_name("slurm-down.sh")],
            capture_output=True,
            timeout=180,
            check=False,
        )


@pytest.fixture(autouse=True)
def at_cluster(cluster, workplace, monkeypatch):
    """Commands of this test speak to the cluster."""
    monkeypatch.setenv("SLURM_CONF", cluster)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.fixture
def submit(small, capsys):
    """Submits a small run; gives the job's number."""

    def run(name, *flags):
        capsys.readouterr()
        assert main(["submit", "--time", "00:30:00", *small(name, *flags)[1:]]) == 0
        found = re.search(r"Submitted batch job (\d+)", capsys.readouterr().out)
        assert found
        return found[1]

    return run


def _wait(what, holds, said):
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"waited for {what} in vain: {said()}"
        time.sleep(0.5)


def _state(job):
    """Of the first task of a job."""
    return dict(
        re.findall(r"(\w+)=(\S+)", _said("scontrol", "-o", "show", "job", job).partition("\n")[0])
    )


def _logs(folder):
    return "\n".join(
        file.read_text()[-2000:] for file in sorted((folder / "runs" / "jobs").glob("*.out"))
    )


def _finished(folder, job, *names):
    """Wait until the runs have ended well."""

    def done():
        state = _state(job).get("JobState", "")
        assert state not in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), (
            f"{state}\n{_logs(folder)}"
        )
        return state == "COMPLETED" and all(
            (folder / "runs" / n / "summary.json").exists() for n in names
        )

    _wait(f"job {job}", done, lambda: f"{_state(job)}\n{_logs(folder)}")


def _rounds(folder, name):
    file = folder / "runs" / name / "metrics.csv"
    return max(len(file.read_text().splitlines()) - 1, 0) if file.exists() else 0


@pytest.mark.parametrize("nodes, tasks", [(1, 2), (2, 1)])
def test_tasks_on_nodes_give_what_one_process_gives(
    nodes,
    tasks,
    fit,
    submit,
    workplace,
    record,
):
    job = submit("several", f"--nodes {nodes} --tasks-per-node {tasks}")
    one = fit("one")
    _finished(workplace, job, "several")
    assert _state(job)["NumNodes"] == str(nodes)
    assert record(one.with_name("several")) == record(one)
    assert '"world_size": 2' in (one.with_name("several") / "summary.json").read_text()


def test_a_sweep_of_seeds_is_an_array(fit, submit, workplace, record, capsys):
    job = submit("swept", "--array seed=0-2")
    names = [f"swept-seed{seed}" for seed in range(3)]
    expected = [record(fit(f"alone{seed}", f"--seed {seed}")) for seed in range(3)]
    _finished(workplace, job, *names)
    found = [record(workplace / "runs" / name) for name in names]
    assert found == expected
    assert found[0] != found[1]
    capsys.readouterr()
    assert run_line("status runs") == 0
    assert capsys.readouterr().out.count("finished") == 6


def test_near_its_limit_a_job_saves_and_goes_on_in_its_next_turn(fit, submit, workplace, record):
    job = submit("broken", SLOW, "--nodes 1 --tasks-per-node 2")
    _wait("rounds", lambda: _rounds(workplace, "broken") >= 2, lambda: _logs(workplace))
    assert not (workplace / "runs" / "broken" / "summary.json").exists()
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True, timeout=60)
    _finished(workplace, job, "broken")
    assert _state(job)["Restarts"] == "1"
    assert "queued again" in _logs(workplace)
    assert record(workplace / "runs" / "broken") == record(fit("unbroken", SLOW))


def test_a_job_that_an_urgent_one_pushes_out_goes_on_after_it(fit, submit, workplace, record):
    job = submit("pushed", SLOW)
    _wait("rounds", lambda: _rounds(workplace, "pushed") >= 2, lambda: _logs(workplace))
    urgent = [
        "sbatch",
        "--wait",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--wrap=sleep 1",
    ]
    subprocess.run(
        [*urgent, "--output=/dev/null"], check=True, timeout=300, stdout=subprocess.DEVNULL
    )
    _finished(workplace, job, "pushed")
    assert int(_state(job)["Restarts"]) >= 1
    assert record(workplace / "runs" / "pushed") == record(fit("unbroken", SLOW))


@pytest.mark.parametrize(
    "words",
    ["--gpus-per-node 5", "--nodes 3 --gpus-per-node 1", "--nodes 3", "--partition nowhere"],
)
def test_a_job_that_the_cluster_cannot_run_is_refused(small, workplace, capsys, words):
    assert shutil.which("sbatch")
    assert main(["submit", "--time", "00:10:00", *words.split(), *small("many")[1:]]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words.rsplit(maxsplit=1)[-1] in err and "sbatch refuses the job" in err
