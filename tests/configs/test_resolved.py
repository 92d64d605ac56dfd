"""Every shipped config and study resolves to the values that are kept in `resolved.json`."""

import pytest
import resolved

KEPT = resolved.kept()


def test_all_that_is_shipped_is_kept():
    assert sorted(KEPT["configs"]) == sorted(resolved.configs())
    assert sorted(KEPT["studies"]) == sorted(resolved.studies())


@pytest.mark.parametrize("name", sorted(KEPT["configs"]))
def test_a_config_resolves_to_what_is_kept(name):
    values = resolved.whole(KEPT["common"], KEPT["configs"][name])
    assert resolved.differences(resolved.of_config(name), values) == {}


@pytest.mark.sampled("digits/first", "fedhkd/table1-cpu")
@pytest.mark.parametrize("name", sorted(KEPT["studies"]))
def test_a_study_resolves_to_what_is_kept(name):
    kept, now = KEPT["studies"][name], resolved.of_study(name)
    assert sorted(now) == sorted(kept["runs"])
    first = resolved.whole(KEPT["common"], kept["first"])
    for folder, own in kept["runs"].items():
        assert resolved.differences(now[folder], resolved.whole(first, own)) == {}, folder
