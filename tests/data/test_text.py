import numpy as np
import pytest
import torch
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare, table, text
from fl_lightning.data.source import Absent

VERSE = "to be, or not to be: that is the question.\n"


def read(folder, **keys):
    return text.load(DataConfig(source="text", root=str(folder), **keys))


@pytest.fixture
def plays(tmp_path):
    (tmp_path / "hamlet.txt").write_text(VERSE * 20, encoding="utf-8")
    (tmp_path / "lear.txt").write_text(
        "Blow, winds, and crack your cheeks! " * 20, encoding="utf-8"
    )
    (tmp_path / "notes.md").write_text("no play")
    return str(tmp_path)


def test_targets_are_the_next_characters_and_parts_share_none(plays):
    source = read(plays, length=10)
    assert source.group_names == ["hamlet", "lear"]
    names, texts = source.class_names, [VERSE * 20, "Blow, winds, and crack your cheeks! " * 20]
    assert (
        source.vocabulary == len(names)
        and names[0] == "<unknown>"
        and names[1:] == sorted(names[1:])
    )
    seen = []
    for pool in (source.train, source.test):
        x, y = pool.read_all(), pool.labels
        assert x.shape == y.shape == (len(y), 10) and x.dtype == y.dtype == np.int64
        assert (x[:, 1:] == y[:, :-1]).all()
        assert pool.spans is not None and pool.groups is not None
        for tokens, target, (file, begin, end) in zip(x, y, pool.spans, strict=True):
            assert "".join(names[t] for t in [*tokens, target[-1]]) == texts[file][begin:end]
        assert (pool.groups == pool.spans[:, 0]).all() and (pool.strata == 0).all()
        seen.append({(f, k) for f, begin, end in pool.spans.tolist() for k in range(begin, end)})
    assert not seen[0] & seen[1] and min(map(len, seen)) > 150


def test_folders_and_files_that_do_not_go(tmp_path):
    with pytest.raises(Absent, match=r"data\.root=None.*\.txt"):
        text.load(DataConfig(source="text"))
    with refuses(r"holds no \.txt file"):
        read(tmp_path)
    (tmp_path / "short.txt").write_text("ab" * 30)
    with refuses(r"data\.length=80.*short\.txt has 60 tokens and needs 406"):
        read(tmp_path)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with refuses(r"data\.root=.*bytes\.txt is no text in UTF-8"):
        read(tmp_path)


LINES = [
    f"{'good' if k % 2 else 'bad'} film number {k},{'pos' if k % 2 else 'neg'},{k % 3}"
    for k in range(60)
]


@pytest.fixture
def reviews(tmp_path):
    (tmp_path / "reviews.csv").write_text("\n".join(["review,mood,site", *LINES]))
    return str(tmp_path / "reviews.csv")


def test_a_column_of_texts_in_a_table(reviews):
    config = DataConfig(
        root=reviews,
        columns=["review"],
        label_column="mood",
        group_column="site",
        tokens="characters",
        length=12,
        partition="natural",
    )
    source = table.load(config)
    assert source.class_names == ["neg", "pos"] and source.group_names == ["0", "1", "2"]
    # every character is in training, too
    _, encode = text.characters(line.split(",")[0] for line in LINES)
    for pool in (source.train, source.test):
        for tokens, label in zip(pool.read_all(), pool.labels, strict=True):
            assert tokens.tolist() == encode("good film nu" if label else "bad film num")
    data = prepare(config, 3, 0)
    assert (
        data.vocabulary == source.vocabulary and data.num_classes == 2 and data.input_shape == (12,)
    )
    x, y = next(iter(data.client(0).train.batches(4)))
    assert x.dtype == y.dtype == torch.int64


def test_word_pieces(reviews):
    pytest.importorskip("tokenizers", reason="the extra text is not installed")
    config = DataConfig(
        root=reviews, columns=["review"], label_column="mood", tokens="word_pieces", length=6
    )
    config.vocabulary = 60
    source = table.load(config)
    assert source.vocabulary <= 60
    first = source.train.read_all()
    assert first.shape[1] == 6 and first.max() < source.vocabulary
    good, bad = (first[source.train.labels == label] for label in (1, 0))
    assert len(np.unique(good[good > 0])) > 1 and {tuple(row) for row in good}.isdisjoint(
        {tuple(row) for row in bad}
    )
