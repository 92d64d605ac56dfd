"""What every method of the project must hold, new ones included: neither processes nor a break
change a number.

One run is cut twice: its first round is one process's, two go on with its checkpoint, and one ends
it with theirs. What other tests hold is not run again: all rounds on two processes (tests/golden),
one process that goes on with its own checkpoint (tests/golden, test_resume.py). Three of five
clients take part; no method asks whether that is everybody, so of each kind one runs with
everybody.
"""

import pytest

from fl_lightning.configuration import catalogue

PUBLIC = "--data.public held_back --method.samples 24"
NEEDS = {
    **dict.fromkeys(("fedora", "fedfomo", "knnper"), "--data.validation 0.2"),
    "lgfedavg": "--method.layers 1",
    **dict.fromkeys(("fedsalora", "ffalora"), "--model.adapters.rank 2"),
    **dict.fromkeys(("fedmd", "simpfd", "topkpfd", "ktpfl"), PUBLIC),
    **dict.fromkeys(("feddf", "pfeddf"), f"{PUBLIC} --method.steps 5"),
}
"""What a method asks for beyond the defaults."""
WITH_ALL = ("fedavg", "kapc", "ktpfl", "ditto", "fedrep", "fedhkd")
"""Of every kind one: a global model; a relation; predictions; a further vector; several phases;
statistics."""
CASES = [*((name, 0.6) for name in catalogue.table("methods")), *((name, 1.0) for name in WITH_ALL)]


@pytest.mark.slow
@pytest.mark.parametrize("method, share", CASES)
def test_two_processes_and_two_breaks_change_nothing(
    method,
    share,
    fit,
    small,
    on_ranks,
    record,
):
    flags = (
        f"--method {method} --federation.participation {share} {NEEDS.get(method, '')} "
        f"--federation.rounds"
    )
    fit("cut", flags, "1")
    on_ranks(2, small("cut", flags, "3 --resume"))
    cut, whole = (
        record(fit(*words)) for words in (("cut", flags, "4 --resume"), ("whole", flags, "4"))
    )
    assert whole.weights and cut == whole
