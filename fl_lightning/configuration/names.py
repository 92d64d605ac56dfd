"""The names of `fl-train list sources` and `list partitions`, as plain data: nothing heavy is
imported to read it."""

from __future__ import annotations

SOURCES: dict[str, str] = {
    "digits": "1,797 real handwritten digits of 8x8 pixels that ship with scikit-learn: no "
    "network, the "
    "default",
    "arrays": "your own arrays: data.root is an .npz file with x_train, y_train, x_test, y_test",
    "images": "your own image folder: data.root holds train/CLASS and test/CLASS, or CLASS folders "
    "alone",
    "table": "your own CSV file: data.root; features in columns, or a column of image files; see "
    "data.label_column",
    "watch": "smartwatch recordings of 10 persons (natural groups), 7 exercises, windows of 2 s; "
    "with "
    "the extra watch",
    "glyphs": "letters and digits rendered from typefaces, 28x28 grey, 62 classes; a group for "
    "each "
    "(data.root: *.ttf)",
    "digit_pair": "two domains: the bundled digits, and as many of MNIST (data.root) resized to "
    "8x8; 10 "
    "classes",
    "domains": "image folders by domain: data.root holds DOMAIN/CLASS (PACS, Office-Home, "
    "DomainNet); "
    "groups: domains",
    "leaf": "LEAF's JSON (FEMNIST, Shakespeare): data.root holds train/ and test/, or one folder; "
    "groups: its users",
    "hf": "Hugging Face data: data.root is saved to disk, or parquet; columns as for table; with "
    "the extra hf",
    "text": "your own text: data.root is a folder of .txt files (groups); the next token of "
    "data.length ones",
    "mnist": "handwritten digits, 28x28 grey, 10 classes",
    "fashionmnist": "clothing, 28x28 grey, 10 classes",
    "kmnist": "cursive Japanese characters, 28x28 grey, 10 classes",
    "qmnist": "MNIST re-made with all 60,000 test digits, 28x28 grey, 10 classes",
    "emnist": "letters and digits, the balanced split, 28x28 grey, 47 classes",
    "emnist_balanced": "letters and digits, balanced, 28x28 grey, 47 classes",
    "emnist_byclass": "letters and digits, upper and lower case apart, 28x28 grey, 62 classes",
    "emnist_bymerge": "letters and digits, look-alike cases merged, 28x28 grey, 47 classes",
    "emnist_digits": "EMNIST's digits, 28x28 grey, 10 classes",
    "emnist_letters": "EMNIST's letters, cases merged, 28x28 grey, 26 classes",
    "emnist_mnist": "EMNIST's own MNIST, 28x28 grey, 10 classes",
    "usps": "post-office digits, 16x16 grey, 10 classes",
    "semeion": "1,593 scanned digits, 16x16 grey, 10 classes; our 80/20 split",
    "cifar10": "small photographs, 32x32 colour, 10 classes",
    "cifar100": "small photographs, 32x32 colour, 100 classes",
    "svhn": "house numbers, 32x32 colour, 10 classes",
    "stl10": "photographs, 96x96 colour, 10 classes",
    "gtsrb": "German traffic signs, resized to 32x32 colour, 43 classes",
    "dtd": "textures, resized to 32x32 colour, 47 classes",
    "eurosat": "satellite views, resized to 32x32 colour, 10 classes; our 80/20 split",
    "flowers102": "flowers, resized to 32x32 colour, 102 classes",
    "food101": "dishes, resized to 32x32 colour, 101 classes",
    "oxfordiiitpet": "cats and dogs by breed, resized to 32x32 colour, 37 classes",
    "fgvcaircraft": "aircraft by variant, resized to 32x32 colour, 100 classes",
    "stanfordcars": "cars by model, resized to 32x32 colour, 196 classes; by hand, no download",
    "pcam": "lymph-node patches, resized to 32x32 colour, 2 classes; needs h5py",
    "renderedsst2": "sentences drawn as images, resized to 32x32 colour, 2 classes",
    "country211": "photographs by country, resized to 32x32 colour, 211 classes",
    "clevrclassification": "rendered scenes by number of objects, resized to 32x32 colour, 8 "
    "classes; test is `val`",
    "fer2013": "faces by expression, resized to 32x32 colour, 7 classes; by hand, no download",
    "imagenette": "ten easy ImageNet classes, resized to 32x32 colour; test is `val`",
    "imagenet": "ImageNet 2012, resized to 32x32 colour, 1,000 classes; by hand, no download; test "
    "is "
    "`val`",
    "places365": "scenes, resized to 32x32 colour, 365 classes; test is `val`",
    "sun397": "scenes, resized to 32x32 colour, 397 classes; our 80/20 split",
    "caltech101": "objects, resized to 32x32 colour, 101 classes; our 80/20 split",
    "caltech256": "objects, resized to 32x32 colour, 257 classes; our 80/20 split",
    "inaturalist": "species, iNaturalist 2021 mini, resized to 32x32 colour, 10,000 classes; test "
    "is `valid`",
}

PARTITIONS: dict[str, str] = {
    "dirichlet": "shares by a Dirichlet(alpha) draw, by class or by client (data.by), free or "
    "equal sizes "
    "(data.sizes)",
    "mixture": "data.groups groups: a mix for each by Dir(alpha), near it one for each client "
    "(data.concentration)",
    "hsu": "a class mix for each client by a Dirichlet(alpha p) draw, equal sizes (Hsu et al., "
    "2019; "
    "the KAPC papers)",
    "pathological": "every client holds exactly data.classes_per_client classes (McMahan et al., "
    "2017)",
    "lognormal": "client u holds data.classes_per_client classes from u on, in lognormal counts "
    "(KT-pFL's "
    "generator)",
    "rotated": "alike shares; client i of N sees its images turned by 360 i / N degrees",
    "natural": "a client for each person, writer, file or domain of the source, or value of "
    "data.group_column (tables)",
    "iid": "alike shares, dealt at random",
}
