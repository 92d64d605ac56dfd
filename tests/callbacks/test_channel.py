"""Seconds from bytes: by hand, by order, by chance, and as the journal's Table 5 has them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_allclose
from refusals import refuses

from fl_lightning.callbacks.channel import PARTS, FixedRate, Wireless, rate
from fl_lightning.foundation.rng import numpy_rng
from fl_lightning.results.folder import CLIENT_FLOPS

from . import rounds

MIB = 2**20


def run(seed=0):
    return SimpleNamespace(config=SimpleNamespace(seed=seed), callbacks=[], is_main=True)


def record(sizes, round=1, **work):
    """A round of clients with their bytes down and up, and what they compute (without any `work`:
    not known)."""
    work = {name: work.get(name, 0.0) for name in CLIENT_FLOPS} if work else {}
    clients = [
        {"client": c, "download_bytes": d, "upload_bytes": u, **work} for c, (d, u) in sizes.items()
    ]
    return rounds.record(round, sizes, clients=clients)


def seconds(channel, sizes, round=1, seed=0):
    """Download, compute and upload of each client."""
    made = record(sizes, round, flops_forward=0.0)
    channel.on_round_end(run(seed), made)
    return {int(row["client"]): [row[part] for part in PARTS] for row in made.clients}


# ---------------------------------------------------------------- fixed rates


def test_fixed_rates_are_exact_and_the_slowest_is_the_round():
    """2 and 8 Mbit/s, 50 ms: a megabyte takes 4.05 s up and 1.05 s down."""
    made = record({3: (1e6, 1e6), 5: (2e6, 1e6), 8: (0, 0)}, flops_forward=1e9, flops_penalty=5e8)
    FixedRate(2.0, 8.0, latency_ms=50, client_gflops=3.0).on_round_end(run(), made)
    assert [[row[part] for part in PARTS] for row in made.clients] == [
        pytest.approx([1.05, 0.5, 4.05]),
        pytest.approx([2.05, 0.5, 4.05]),
        [0.0, 0.5, 0.0],
    ]
    slowest = made.clients[1]
    assert made.metrics == {
        "channel_s": sum(slowest[part] for part in PARTS),
        **{p: slowest[p] for p in PARTS},
    }


# ---------------------------------------------------------------- the radio cell


def test_shannon_by_hand():
    """A signal as strong as the noise: a bit a second for each hertz; 3 and 1023 times as strong: 2
    and 10."""
    one = rate(np.full(3, 1e6), np.array([1e-9, 3e-9, 1023e-9]), 1e-15)
    assert_allclose(one, [1e6, 2e6, 10e6])
    # At 1 km: 30 dBm - 130 dB = -100 dBm, noise -170 dBm/Hz + 60 dB for a megahertz + 10 dB = -100
    # dBm: 1 bit/s/Hz, down, where the whole power of 3 MHz is shared like the band. Up 23 dB more:
    # log2(1 + 10^2.3) = 7.65.
    cell = Wireless(
        3.0,
        3.0,
        client_dbm=53.0,
        server_dbm=30 + 10 * math.log10(3),
        path_loss_db=130.0,
        noise_dbm_hz=-170.0,
        interference_db=10.0,
        near=1000.0,
        far=1000.0,
    )
    got = cell.rates(run(), 1, [0, 1, 2], np.ones((3, 2)))
    assert_allclose(got, [[1e6, 1e6 * math.log2(1 + 10**2.3)]] * 3)


def test_bands_are_shared_among_those_who_use_them():
    alone = seconds(Wireless(), {0: (1e6, 1e6)})[0]
    idle = seconds(Wireless(), {0: (1e6, 1e6), 1: (0, 0)})
    assert idle == {0: alone, 1: [0.0, 0.0, 0.0]}
    both = seconds(Wireless(), {0: (1e6, 1e6), 1: (1e6, 1e6)})[0]
    assert both[0] == pytest.approx(2 * alone[0])  # power is shared like the band
    assert alone[2] < both[2] < 2 * alone[2]  # a client has its whole power in half the band
    same_place = {"near": 100.0, "far": 100.0, "shares": "bytes"}
    uneven = seconds(Wireless(**same_place), {0: (1e6, 1e6), 1: (1e6, 3e6)})
    cell = Wireless(**same_place)
    bits = cell.rates(run(), 1, [0, 1], np.array([[1e6, 1e6], [1e6, 3e6]]))[:, 1]
    assert uneven[1][2] == pytest.approx(24e6 / bits[1])
    noise = 10 ** ((-174 + 5.9) / 10 - 3)
    received = 10 ** ((23 - 128.1 + 37.6) / 10 - 3)  # at a tenth of a kilometre
    assert_allclose(bits, rate(np.array([0.25, 0.75]) * 28.6e6, np.array([received]), noise))


@pytest.mark.parametrize("shares", ["equal", "bytes"])
def test_downloads_do_not_depend_on_uploads(shares):
    """The server's power is shared like its own band, however the band of uploads is."""
    cell = Wireless(near=100.0, far=100.0, shares=shares)
    alike = cell.rates(run(), 1, [0, 1, 2], np.ones((3, 2)))
    unlike = cell.rates(run(), 1, [0, 1, 2], np.array([[1.0, 1.0], [1.0, 3.0], [1.0, 0.0]]))
    assert_allclose(unlike[:, 0], alike[:, 0])


def test_fading_is_one_on_average():
    still, moving = Wireless(), Wireless(fading=True)
    ratios = np.array([moving.gains(0, t, 5) / still.gains(0, t, 5) for t in range(4000)])
    assert_allclose(ratios.mean(axis=0), 1.0, atol=0.06)  # four standard errors
    assert abs(np.corrcoef(ratios.T)[0, 1]) < 0.06  # up and down fade apart
    assert np.mean(ratios < math.log(2)) == pytest.approx(0.5, abs=0.03)  # the exponential's median


def test_the_defaults_give_the_journals_times():
    """ResNet-18, 10 of 100 clients, 42.654 MiB each way: 19.28 s up and 7.16 s down for the slowest
    (Table 5)."""
    made = []
    for seed in range(300):
        cohort = numpy_rng(seed, "cohort", 1).choice(100, 10, replace=False)
        made.append(
            record({int(c): (42.654 * MIB, 42.654 * MIB) for c in cohort}, flops_forward=0.0)
        )
        Wireless().on_round_end(run(seed), made[-1])
    down, _, up = (np.mean([one.metrics[part] for one in made]) for part in PARTS)
    assert up == pytest.approx(19.28, rel=0.02)
    assert down == pytest.approx(7.16, rel=0.02)


# ---------------------------------------------------------------- in a run


def test_two_channels_are_refused(make_run):
    two = make_run(callbacks=[FixedRate(), Wireless()])
    with refuses(r"callbacks=.fixedrate, wireless.: a round has one length"):
        two.callbacks[0].on_fit_start(two)
    FixedRate().on_fit_start(make_run(callbacks=[FixedRate()]))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FixedRate(0.0), r"callbacks\.fixedrate\.upload_mbit=0\.0.*above 0"),
        (
            lambda: FixedRate(client_gflops=0.0),
            r"fixedrate\.client_gflops=0\.0.*above 0, or null",
        ),
        (lambda: Wireless(latency_ms=-1.0), r"callbacks\.wireless\.latency_ms=-1\.0.*0 or more"),
        (lambda: Wireless(far=10.0), r"wireless\.far=10\.0.*at least near = 35"),
        (lambda: Wireless(client_dbm=1e4), r"wireless\.client_dbm"),
        (lambda: Wireless(shares="fair"), r"wireless\.shares=.fair..*one of equal, bytes"),
    ],
)
def test_bad_values_are_named(make, message):
    with refuses(message):
        make()
