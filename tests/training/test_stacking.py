"""Which methods' phases go through stacked passes: docs/performance.md says it of each."""

import re
from pathlib import Path

import pytest

from fl_lightning.engine.worker import Worker
from fl_lightning.sites.rehearsal import simulate
from tests.deploy.test_equal import config_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


def listed():
    """`all`, `some` or `none` by method."""
    section = PAGE.read_text(encoding="utf-8").split("### Which methods stack")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (all|some|none)\b[^|]*\| (.*) \|$", section, re.MULTILINE)
    return {name: kind for kind, names in rows for name in re.findall(r"`(\w+)`", names)}


@pytest.mark.slow
@pytest.mark.parametrize("method", listed())
def test_phases_stack_as_the_page_says(method, tmp_path, monkeypatch):
    alone = []
    executors = {}
    train = Worker._train

    def seen(self, visits, jobs):
        for c, job in jobs.items():
            trainer = visits[c].trainer
            if trainer not in executors:
                executors[trainer], reason = trainer.made("vmap")
                assert reason is None
            alone.append(not executors[trainer].takes(job))
        return train(self, visits, jobs)

    monkeypatch.setattr(Worker, "_train", seen)
    simulate(config_of(method), tmp_path)
    assert alone
    assert listed()[method] == ("none" if all(alone) else "some" if any(alone) else "all")
