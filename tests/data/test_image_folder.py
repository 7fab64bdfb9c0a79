"""``ImageFolder``: classes, order, augmentation, and errors for folders and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import FormatError, ParameterError

Image = pytest.importorskip("PIL.Image")
CLASSES = {"Äpfel": 0, "blau — see": 80, "zebra": 160}


def write_photos(folder: Path, each: int = 5) -> Path:
    """Write small images in four formats whose grey value encodes class and number; return ``folder``."""
    for name, value in CLASSES.items():
        for k in range(each):
            path = folder / name / ("tief" if k == 3 else "") / f"bild {k}ß{('.png', '.jpg', '.bmp', '.webp')[k % 4]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((9 + k, 12, 3), value + k * 5, np.uint8)).save(path)
    return folder


def image_numbers(iterator: mx.io.DataIter) -> list[int]:
    """Return the numbers of an epoch's images, without padding."""
    results: list[int] = []
    for batch in iterator:
        results += batch.index[: len(batch.index) - batch.pad].tolist()
    return results


def test_classes_labels_and_order(tmp_path: Path) -> None:
    """Classes and files are sorted by name; hidden and other files are ignored; pixels and labels fit the files."""
    (write_photos(tmp_path) / "zebra" / "notes.txt").write_text("no image")
    (tmp_path / "zebra" / ".hidden.png").write_bytes(b"")
    (tmp_path / ".git").mkdir()
    actual = mx.io.ImageFolder(tmp_path, (3, 8, 8), 4)
    assert actual.classes == sorted(CLASSES) == ["blau — see", "zebra", "Äpfel"]
    assert actual.files == [f"{c}/{f}" for c in actual.classes for f in sorted(
        ["bild 0ß.png", "bild 1ß.jpg", "bild 2ß.bmp", "tief/bild 3ß.webp", "bild 4ß.png"])]  # fmt: skip
    assert image_numbers(actual) == list(range(15))
    actual.reset()
    for batch in actual:
        for data, label, k in zip(batch.data[0].asnumpy(), batch.label[0].asnumpy(), batch.index, strict=True):
            assert actual.labels[k] == label == actual.classes.index(actual.files[k].partition("/")[0])
            expected = CLASSES[actual.classes[int(label)]] + 5 * int(actual.files[k].rpartition("bild ")[2][0])
            assert data.shape == (3, 8, 8)
            assert abs(data.mean() - expected) < 3


def test_composed_and_decomposed_names_sort_alike(tmp_path: Path) -> None:
    """Class names in decomposed Unicode sort like composed names."""
    for form, names in (("composed", ["z", "\u00e4", "b"]), ("decomposed", ["z", "a\u0308", "b"])):
        for name in names:
            (tmp_path / form / name).mkdir(parents=True)
            Image.new("L", (8, 8)).save(tmp_path / form / name / "x.png")
    assert mx.io.ImageFolder(tmp_path / "composed", (3, 8, 8)).classes == ["b", "z", "\u00e4"]
    assert mx.io.ImageFolder(tmp_path / "decomposed", (3, 8, 8)).classes == ["b", "z", "a\u0308"]


def test_seed_decides_order_and_augmentation(tmp_path: Path) -> None:
    """One seed gives the same bits with 1 and 5 threads; other epochs and seeds give others."""
    write_photos(tmp_path)

    def epochs(seed: int, threads: int) -> list[np.ndarray]:
        actual = mx.io.ImageFolder(
            tmp_path, (3, 8, 8), 4, shuffle=True, seed=seed, preprocess_threads=threads, rand_crop=True,
            rand_mirror=True, random_h=20,
        )  # fmt: skip
        first = [batch.data[0].asnumpy() for batch in actual]
        actual.reset()
        return first + [batch.data[0].asnumpy() for batch in actual]

    one, second = epochs(1, 1), epochs(1, 5)
    np.testing.assert_array_equal(one, second)
    assert not np.array_equal(one[:4], one[4:])
    assert not np.array_equal(one, epochs(2, 1))


def test_validation_data_has_the_labels_of_training(tmp_path: Path) -> None:
    """``classes`` fixes the labels even if a class has no folder; ``files`` selects images; unknown names raise."""
    train = mx.io.ImageFolder(write_photos(tmp_path / "train"), (3, 8, 8))
    (write_photos(tmp_path / "val") / "blau — see").rename(tmp_path / "gone")
    val = mx.io.ImageFolder(tmp_path / "val", (3, 8, 8), classes=train.classes)
    assert set(val.labels) == {1, 2}
    few = mx.io.ImageFolder(tmp_path / "train", (3, 8, 8), 2, files=train.files[3:7])
    assert few.files == train.files[3:7]
    assert few.labels.tolist() == [0, 0, 1, 1]
    with pytest.raises(ParameterError, match=r"files: .* has no image \['zebra/no\.png'\]"):
        mx.io.ImageFolder(tmp_path / "train", files=["zebra/no.png"])
    with pytest.raises(FormatError, match=r"\['blau — see'\] is not among the classes \['zebra', 'Äpfel'\]"):
        mx.io.ImageFolder(tmp_path / "train", classes=["zebra", "Äpfel"])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (None, "expected a folder with a sub-folder of images for each class, but it does not exist"),
        (["x.png"], "there is no sub-folder; move the images of each class into a folder of its own"),
        (["a/x.png", "b/notes.txt"], r"no image is in the folder of \['b'\]; expected files such as \.jpg"),
    ],
)
def test_folders_that_do_not_fit(tmp_path: Path, names: list[str] | None, words: str) -> None:
    """A missing folder, no class folder or a class without images raises; the error names the folder and the remedy."""
    folder = tmp_path / "photos"
    for name in names or ():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9)).save(folder / name, format="PNG")
    with pytest.raises(FormatError, match=words) as caught:
        mx.io.ImageFolder(folder)
    assert str(folder) in str(caught.value)


def test_broken_image_is_named(tmp_path: Path) -> None:
    """A damaged file raises when its batch is read; the error names the file."""
    write_photos(tmp_path)
    path = tmp_path / "zebra" / "bild 0ß.png"
    path.write_bytes(path.read_bytes()[:20])
    actual = mx.io.ImageFolder(tmp_path, (3, 8, 8), 15)
    with pytest.raises(FormatError, match=r"zebra/bild 0ß\.png: (a damaged|no) image"):
        actual.next()


def test_grey_images_and_misspelt_settings(tmp_path: Path) -> None:
    """One channel gives grey images; an unknown setting warns with the nearest name."""
    write_photos(tmp_path)
    assert mx.io.ImageFolder(tmp_path, (1, 8, 8), 4).next().data[0].shape == (4, 1, 8, 8)
    with pytest.warns(UserWarning, match="ImageFolder: 'rand_miror' is no setting; did you mean 'rand_mirror'"):
        mx.io.ImageFolder(tmp_path, (3, 8, 8), rand_miror=True)


def test_module_learns_from_a_folder(tmp_path: Path) -> None:
    """``fit`` and ``score`` accept an ImageFolder, and the accuracy is above 0.9."""
    data = mx.io.ImageFolder(write_photos(tmp_path), (3, 8, 8), 5, shuffle=True, scale=1 / 255)
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3), name="softmax")
    mx.random.seed(0)
    module = mx.mod.Module(net)
    module.fit(data, num_epoch=40, optimizer_params={"learning_rate": 0.05})
    assert module.score(data, "acc")[0][1] > 0.9
