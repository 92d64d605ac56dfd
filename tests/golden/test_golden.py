"""Every golden run gives the numbers that it gave, and runs that must be equal are, to the bit (see
golden.py).

Numbers that are meant to change are looked at and kept with `python tests/golden/golden.py
--write`.
"""

import cases
import golden
import pytest

from fl_lightning.configuration import catalogue

METHODS = list(catalogue.table("methods"))
HELD = golden.kept()
HINT = "if that is meant, keep it with: python tests/golden/golden.py --write"
RUNS = cases.runs()
RANKED = [name for name, run in RUNS.items() if run.ranks > 1]
TWINS = [name for name, run in RUNS.items() if run.ranks == 1 and (run.equals or run.near)]
QUICK = (
    "kapc ktpfl fedora fedhkd ditto fedrep feddf "
    "kapc-selected fedavg-trimmed kapc-skip fedavg-mixed"
)
"""Of every kind one, and the settings that most go wrong; all others are among the slow tests."""


@pytest.fixture(scope="module")
def ran():
    """The numbers of runs by name; each is carried out once."""
    known = {}

    def get(*names):
        known.update(golden.numbers([name for name in names if name not in known]))
        return {name: known[name] for name in names}

    return get


def test_every_run_is_kept_or_equals_one_that_is():
    assert set(HELD["runs"]) == {name for name, run in RUNS.items() if not run.equals}, HINT
    assert set(METHODS) <= set(HELD["runs"])
    assert {f"{name}-two-ranks" for name in METHODS} <= set(RANKED)


@pytest.mark.sampled(*(f"[{name}]" for name in QUICK.split()))
@pytest.mark.parametrize("name", HELD["runs"])
def test_the_numbers_are_those_that_are_kept(name, ran):
    differences = golden.changes(name, RUNS[name], ran(name)[name], HELD)
    assert not differences, "\n".join([HINT, *differences[:20]])


@pytest.mark.sampled("retry")
@pytest.mark.parametrize("name", TWINS)
def test_another_way_gives_the_same(name, ran):
    """Interrupted and resumed, another bank, a client that was tried again: to the bit; stacked:
    within 1e-9."""
    run = RUNS[name]
    assert not golden.unlike(name, run, ran(name, run.equals or run.near))


@pytest.mark.sampled("selected")
@pytest.mark.parametrize("name", RANKED)
def test_two_ranks_give_what_one_gives(name, ran):
    run = RUNS[name]
    assert not golden.unlike(name, run, ran(name, run.equals))


def test_the_bad_clients_did_fail(ran):
    """Else the runs with failures would show nothing."""
    found = ran("fedavg-skip", "kapc-skip", "kapc-retry")
    outcomes = {name: numbers["failures.csv/outcome"] for name, numbers in found.items()}
    assert outcomes == {
        "fedavg-skip": ["skipped"],
        "kapc-skip": ["skipped"] * 2,
        "kapc-retry": ["retried"],
    }


# ---------------------------------------------------------------- the command and its comparisons


def test_bits_are_asked_for_on_the_same_machine_alone():
    found = {"t/x": [1.0, 2.0, 3.0, 4.0]}
    other = {"t/x": [1.0, 2.0, 3.0, 4.0 + 1e-14]}
    run = cases.Run({})
    for machine, told in ((golden.machine(), 1), ("another", 0)):
        held = {
            "machine": machine,
            "runs": {"r": {"bits": golden.bits(found), "numbers": golden.facts(found)}},
        }
        assert not golden.changes("r", run, found, held)
        assert len(golden.changes("r", run, other, held)) == told
        assert golden.changes("r", run, {"t/x": [1.0, 2.0, 3.0, 4.1]}, held)
        assert golden.changes("new", run, found, held)
