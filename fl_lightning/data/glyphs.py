"""Letters and digits rendered from typefaces, a natural group for each typeface: no handwriting,
but natural clients without a network.

They replace FEMNIST's writers (28x28 grey, the same 62 classes) in trials offline. Results on them
say nothing about FEMNIST.
"""

import string
from pathlib import Path

import numpy as np
from numpy import ndarray

from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data.source import Absent, SamplePool, Source, source_of
from fl_lightning.foundation.errors import BadInput, first_line
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.named import composed, is_hidden
from fl_lightning.foundation.rng import numpy_rng

CLASSES = string.digits + string.ascii_uppercase + string.ascii_lowercase
SIDE, VARIANTS = 28, 5
"""Pixels along an image, and images of each character: 310 of a typeface (FEMNIST: 227 of a writer
on average)."""
SIZES, TURNS, SHIFTS, NOISE = (16, 23), 12.0, 2, 16.0
"""Of a character: range of heights in pixels, most degrees of rotation, most pixels of shift,
deviation of the noise. Ours."""
SHIPPED = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmr10", "cmss10", "cmtt10", "cmb10")
"""Beginnings of the file names of those typefaces of matplotlib that have letters and digits."""


def load(data: DataConfig) -> Source:
    """Render images (1, 28, 28) uint8, light on black; with the same typefaces, every run gets the
    same.

    The typefaces are the .ttf and .otf files in the folder `data.root`, or without it those of
    matplotlib.
    """
    files = _files(data.root)
    images_of_file = len(CLASSES) * VARIANTS
    classes_of_file = np.repeat(np.arange(len(CLASSES)), VARIANTS)
    labels = np.tile(classes_of_file, len(files))
    groups = np.repeat(np.arange(len(files)), images_of_file)

    def read(index: ndarray) -> ndarray:
        images = np.empty((len(index), 1, SIDE, SIDE), np.uint8)
        fonts: dict[tuple[Path, int], object] = {}
        for place, number in enumerate(index.tolist()):
            file = files[number // images_of_file]
            rng = numpy_rng(0, f"{file.name} {number % images_of_file}")
            images[place, 0] = _drawn(file, CLASSES[labels[number]], rng, fonts)
        return images

    def mark(index: ndarray) -> list[bytes]:
        drawn = (files[number // images_of_file] for number in index.tolist())
        return [f"{file.name} {file.stat().st_size}".encode() for file in drawn]

    return source_of(
        data,
        SamplePool(
            labels,
            read,
            groups,
            mark=mark,
        ),
        None,
        list(CLASSES),
        [composed(file.stem) for file in files],
    )


def _files(root: str | None) -> list[Path]:
    """Return the typeface files, sorted by name; each has all the classes."""
    require("report", "data.source", "glyphs")
    if root is None:
        import matplotlib

        folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        files = sorted(folder.glob("*.ttf"))
        shipped = [path for path in files if path.stem.startswith(SHIPPED)]
        return [path for path in shipped if not _missing(path)]
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise Absent(
            "data.root", root, "the source glyphs wants a folder with .ttf or .otf files, or null"
        )
    shown = (path for path in folder.rglob("*") if not is_hidden(path))
    files = sorted(path for path in shown if path.suffix.lower() in (".ttf", ".otf"))
    check("data.root", root, bool(files), "it holds no .ttf or .otf file")
    for path in files:
        try:
            missing = _missing(path)
        except (RuntimeError, OSError) as error:
            problem = f"{path.name} is no typeface ({first_line(error)}): remove it"
            raise BadInput("data.root", root, problem) from error
        check(
            "data.root", root, not missing, f"{path.name} lacks {', '.join(missing[:3])}: remove it"
        )
    return files


def _missing(path: Path) -> list[str]:
    """Return the characters that a typeface lacks."""
    from matplotlib.ft2font import FT2Font

    charmap = FT2Font(str(path)).get_charmap()
    return [character for character in CLASSES if ord(character) not in charmap]


def _drawn(
    file: Path,
    character: str,
    rng: np.random.Generator,
    fonts: dict[tuple[Path, int], object],
) -> ndarray:
    """Render one image of a character, uint8 [28, 28]. `fonts`: cache of open fonts, by file and
    size."""
    from PIL import Image, ImageDraw, ImageFont

    size = int(rng.integers(*SIZES))
    if (file, size) not in fonts:
        fonts[file, size] = ImageFont.truetype(str(file), size)
    font = fonts[file, size]
    shift = rng.integers(-SHIFTS, SHIFTS + 1, 2)
    image = Image.new("L", (SIDE, SIDE))
    middle = (SIDE / 2 + shift[0], SIDE / 2 + shift[1])
    drawing = ImageDraw.Draw(image)
    drawing.text(middle, character, fill=255, font=font, anchor="mm")  # type: ignore[arg-type]
    angle = float(rng.uniform(-TURNS, TURNS))
    turned = image.rotate(angle, Image.Resampling.BILINEAR)
    noise = rng.normal(0, NOISE, (SIDE, SIDE))
    noisy = np.asarray(turned, np.float32) + noise
    return noisy.clip(0, 255).round().astype(np.uint8)
