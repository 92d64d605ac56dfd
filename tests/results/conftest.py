import pytest
import stored


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The stored folders, unpacked; nothing is written to them."""
    folder = tmp_path_factory.mktemp("stored")
    stored.unpacked(folder)
    return folder
