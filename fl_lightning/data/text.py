"""Texts as token numbers: characters or word pieces, learned from training texts. 0 is padding, and
any unknown token."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy import ndarray

from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data import windows
from fl_lightning.data.source import TEST_SHARE, Reading, SamplePool, Source, Tokens, at_root
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.named import composed, entries

Encode = Callable[[str], list[int]]
LAYOUT = "a folder with .txt files in UTF-8, a group for each (a play, a role, an author)"


def load(data: DataConfig) -> Source:
    """Read text files for next-token prediction: samples int64 [n, length], and as labels the next
    token at each place, int64 [n, length].

    The last fifth of each file is its test part. Samples follow each other without overlap; a
    sample across the border is in neither part.

    Raises:
        Absent: the folder is missing.
        BadInput: the folder has no text, or a file is too short or not in UTF-8.
    """
    root, folder = at_root(data, LAYOUT)
    files = entries(folder, "*.txt")
    length = data.length
    check("data.root", root, bool(files), f"it holds no .txt file; it must be {LAYOUT}")
    texts = [_read(root, file) for file in files]
    training_texts = []
    for text in texts:
        border = len(text) - round(TEST_SHARE * len(text))
        training_texts.append(text[:border])
    names, encode, pieces = learn(training_texts, data)
    encoded = [np.array(encode(text), np.int64) for text in texts]
    need = round((length + 1) / TEST_SHARE) + 1
    for file, tokens in zip(files, encoded, strict=True):
        problem = (
            f"{file.name} has {len(tokens)} tokens and needs {need} for a test sample: lower it"
        )
        check("data.length", length, len(tokens) >= need, problem)
    lengths = [len(tokens) for tokens in encoded]
    spans = windows.cut(lengths, length + 1, length)
    train, test = (_next_tokens(encoded, part) for part in spans)
    reading = Reading(
        tokens=Tokens(
            names,
            length,
            "first",
            pieces,
        )
    )
    groups = [composed(file.stem) for file in files]
    return Source(
        train,
        test,
        names,
        groups,
        vocabulary=len(names),
        reading=reading,
    )


def learn(
    texts: Iterable[str],
    data: DataConfig,
) -> tuple[list[str], Encode, str | None]:
    """Learn the tokens of training texts.

    Returns the names of the tokens by number, a function from text to numbers, and the tokenizer of
    word pieces as JSON (None for characters).
    """
    if data.tokens == "word_pieces":
        return _word_pieces(texts, data.vocabulary)
    return *characters(texts), None


def characters(texts: Iterable[str]) -> tuple[list[str], Encode]:
    """Make a token of each character, numbered from 1 by code point; return their names, and a
    function from text to numbers."""
    vocabulary = sorted({character for text in texts for character in text})
    numbers = {character: number for number, character in enumerate(vocabulary, 1)}
    names = ["<unknown>", *vocabulary]
    return names, lambda text: [numbers.get(character, 0) for character in text]


def as_tokens(
    source: Source,
    texts: Sequence[str],
    data: DataConfig,
) -> Source:
    """Return `source`, whose samples are indices into `texts`, with the tokens of these texts as
    samples instead."""
    names, encode, pieces = learn(
        (texts[place] for place in source.train.read_all().tolist()), data
    )
    encoded = padded(texts, lambda text: encode(text)[: data.length], data.length)

    def tokens_of(pool: SamplePool) -> SamplePool:
        def mark(index: ndarray) -> list[bytes]:
            places = pool.read(index).tolist()
            return [texts[place].encode() for place in places]

        return replace(
            pool,
            read=lambda index: encoded[pool.read(index)],
            mark=mark,
        )

    tokens = Tokens(
        names,
        data.length,
        "first",
        pieces,
    )
    reading = replace(source.reading, tokens=tokens)
    train = tokens_of(source.train)
    test = tokens_of(source.test)
    return replace(source, train=train, test=test, vocabulary=len(names), reading=reading)


def padded(
    texts: Sequence[str],
    encode: Encode,
    length: int,
) -> ndarray:
    """Return the tokens of each text, int64 (texts, length), with zeros in front; `encode` returns
    at most `length`."""
    encoded = np.zeros((len(texts), length), np.int64)
    for row, text in zip(encoded, texts, strict=True):
        tokens = encode(text)
        row[length - len(tokens) :] = tokens
    return encoded


def _next_tokens(
    encoded: list[ndarray],
    spans: ndarray,
) -> SamplePool:
    def read(
        index: ndarray,
        shift: int = 0,
    ) -> ndarray:
        rows = []
        for file, begin, end in spans[index]:
            rows.append(encoded[file][begin + shift : end - 1 + shift])
        return np.stack(rows)

    return SamplePool(
        read(np.arange(len(spans)), shift=1),
        read,
        spans[:, 0],
        spans,
    )


def _word_pieces(
    texts: Iterable[str],
    size: int,
) -> tuple[list[str], Encode, str]:
    require("text", "data.tokens", "word_pieces", "characters needs nothing")
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.trainers import WordPieceTrainer

    tokenizer = Tokenizer(WordPiece(unk_token="<unknown>"))
    tokenizer.pre_tokenizer = Whitespace()
    trainer = WordPieceTrainer(vocab_size=size, special_tokens=["<unknown>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    numbers = range(tokenizer.get_vocab_size())
    names = [str(tokenizer.id_to_token(number)) for number in numbers]
    pieces = str(tokenizer.to_str())
    return names, lambda text: list(tokenizer.encode(text).ids), pieces


def _read(root: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise BadInput(
            "data.root", root, f"{file.name} is no text in UTF-8 ({error}): convert it"
        ) from error
