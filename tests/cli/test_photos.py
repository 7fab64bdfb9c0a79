"""Models of one's own from a shell: training on a folder of images, and running a model over one."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import weftplan as mx
from weftplan.cli import main

Image = pytest.importorskip("PIL.Image")
PIXELS = ["--mean", "127.5", "--std", "127.5"]


def photos(folder: Path, classes: tuple[str, ...] = ("hell", "dünkel"), each: int = 10) -> Path:
    """Return a folder of bright and dark images."""
    random = np.random.RandomState(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for k in range(each):
            pixels = np.clip(60 + 130 * number + random.randint(-30, 30, (20 + k % 3, 24, 3)), 0, 255).astype("u1")
            Image.fromarray(pixels).save(folder / name / f"bild {k}.{('png', 'jpg')[k % 2]}")
    return folder


def run(*args: Any) -> Result:
    """Return the result of a command."""
    return CliRunner().invoke(main, [str(one) for one in args])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Images, the prefix of a network trained on them, and the output of training."""
    folder = tmp_path_factory.mktemp("photos")
    images = photos(folder / "images")
    result = run(
        "train", "--data", images, "--network", "lenet", "--epochs", 6, "--batch-size", 4, "--devices", 1,
        "--checkpoint", folder / "net",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return images, folder / "net", result.output


def test_train_tells_classes_and_how_to_use_the_network(trained: tuple[Path, Path, str]) -> None:
    """The images are split by class, the network learns them, and its classes are stored next to it."""
    _, prefix, printed = trained
    words = " ".join(printed.split())
    assert "16 training and 4 test images of 2 classes, 28x28 pixels; lenet, all layers new" in words
    assert "test accuracy │ 1.0000" in words
    assert f"weftplan run {prefix} 6 --input FOLDER --resize 28x28 --mean 127.5 --std 127.5" in words
    assert prefix.with_name("net-classes.txt").read_text(encoding="utf-8") == "dünkel\nhell\n"


def test_run_over_a_folder_writes_tables(trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    """A row for each image and rank, with the name of the class, as CSV and as JSON; batches do not matter."""
    images, prefix, _ = trained
    settings = [prefix, 6, "--input", images, "--resize", "28", *PIXELS]
    for batch, name in ((3, "a.csv"), (32, "a.json")):
        result = run("run", *settings, "--batch", batch, "--top", 2, "-o", tmp_path / name)
        assert result.exit_code == 0, result.output
    with open(tmp_path / "a.csv", encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    rows = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert len(table) == len(rows) == 40
    assert list(table[0]) == ["sample", "output", "rank", "class", "label", "value"]
    best = [row for row in rows if row["rank"] == 1]
    assert {row["sample"].partition("/")[0] == row["label"] for row in best} == {True}
    for left, right in zip(table, rows, strict=True):
        assert (left["sample"], left["label"], int(left["class"])) == (right["sample"], right["label"], right["class"])
        assert float(left["value"]) == pytest.approx(right["value"], rel=1e-5)


def test_broken_images_are_left_out(trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    """Results of all others are there; the file is named, and the exit code is 1."""
    _, prefix, _ = trained
    images = photos(tmp_path / "images", each=2)
    (images / "hell" / "kaputt.jpg").write_bytes(b"no image")
    result = run("run", prefix, 6, "--input", images, "--resize", 28, *PIXELS, "-o", tmp_path / "a.npz")
    assert result.exit_code == 1
    assert "left out: " in result.output
    assert "kaputt.jpg: no image that can be read" in result.output
    with np.load(tmp_path / "a.npz") as actual:
        assert actual["softmax_output"].shape == (4, 2)


def test_fine_tuning_replaces_the_last_layer(trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    """``--from`` with another number of classes makes a new last layer; ``--freeze`` trains nothing else."""
    _, prefix, _ = trained
    images = photos(tmp_path / "images", ("a", "b", "c"))
    result = run(
        "train", "--data", images, "--from", prefix, 6, "--freeze", "--epochs", 1, "--batch-size", 8, "--devices", 1,
        "--checkpoint", tmp_path / "more",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "new: fc2_3_bias, fc2_3_weight" in " ".join(result.output.split())
    before, after = (mx.model.load_params(str(path), epoch)[0] for path, epoch in ((prefix, 6), (tmp_path / "more", 1)))
    assert {"fc2_3_weight", "fc2_3_bias"} == after.keys() - before.keys()
    for name in before.keys() & after.keys():
        np.testing.assert_array_equal(before[name].asnumpy(), after[name].asnumpy())


def test_fine_tuning_goes_on_where_the_classes_fit(trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    """The layers stay, all are trained, and a folder with train and val is not split."""
    _, prefix, _ = trained
    for part, each in (("train", 8), ("val", 3)):
        photos(tmp_path / "images" / part, each=each)
    command = ["train", "--data", tmp_path / "images", "--from", prefix, 6, "--epochs", 1, "--batch-size", 4]
    result = run(*command, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output.splitlines()[-1])["test_accuracy"] == 1.0
    shown = run(*command).output
    assert "16 training and 6 test images" in " ".join(shown.split())
    assert "new: none" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--from", "x", "1"], "--from needs --data FOLDER"),
        (["--freeze", "--data", "IMAGES"], "--freeze needs --from PREFIX EPOCH"),
        (["--network", "resnet18"], "--network resnet18 needs --data FOLDER"),
        (["--data", "IMAGES", "--network", "mlp"], "--network mlp does not take images"),
        (["--data", "IMAGES", "--network", "lenet", "--batch-size", "17"], "16 images are fewer than a batch of 17"),
        (["--data", "nowhere"], "'nowhere' does not exist"),
        (["--data", "IMAGES", "--from", "NET", "6", "--freeze"], "--freeze leaves nothing to train"),
        (["--data", "ONE", "--network", "lenet"], "training needs two classes or more, there is only 'x'"),
        (["--mean", "1,2", "--data", "IMAGES"], "takes 1 or 3 numbers"),
    ],
)
def test_wrong_options_of_training(
    trained: tuple[Path, Path, str], tmp_path: Path, args: list[str], words: str
) -> None:
    """Each is an error before training, which names the missing part."""
    images, prefix, _ = trained
    photos(tmp_path / "one", ("x",))
    places = {"IMAGES": images, "NET": prefix, "ONE": tmp_path / "one"}
    result = run("train", *[places.get(one, one) for one in args])
    assert result.exit_code in (1, 2), result.output
    assert words in " ".join(result.output.split())


def test_run_needs_a_network_of_images(tmp_path: Path) -> None:
    """A folder for a network of other inputs, an empty folder, and a table of an output without classes are refused."""
    net = mx.sym.identity(mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=2, name="c"))
    module = mx.mod.Module(net, label_names=None)
    module.bind([("data", (1, 3, 8, 8))], for_training=False)
    module.init_params()
    module.save_checkpoint(tmp_path / "conv", 0)
    (tmp_path / "empty").mkdir()
    assert "no image is in this folder" in run("run", tmp_path / "conv", 0, "--input", tmp_path / "empty").output
    images = photos(tmp_path / "images", each=1)
    result = run("run", tmp_path / "conv", 0, "--input", images, "--resize", 8, "-o", tmp_path / "x.csv")
    assert result.exit_code == 1
    assert "has no row of classes for each sample" in " ".join(result.output.split())
    assert not (tmp_path / "x.csv").exists()


def test_interrupted_run_goes_on(tmp_path: Path) -> None:
    """A second run under the prefix is refused with the option to type; with it, the bits are those of one run."""
    images = photos(tmp_path / "images")
    command = ["train", "--data", images, "--network", "lenet", "--batch-size", 4, "--devices", 1, "--json"]
    whole = run(*command, "--epochs", 2, "--checkpoint", tmp_path / "a")
    assert run(*command, "--epochs", 1, "--checkpoint", tmp_path / "b").exit_code == 0
    refused = run(*command, "--epochs", 2, "--checkpoint", tmp_path / "b")
    assert refused.exit_code == 1
    assert "pass --resume to go on from it" in " ".join(refused.output.split())
    parts = run(*command, "--epochs", 2, "--checkpoint", tmp_path / "b", "--resume")
    digests = [json.loads(one.output.splitlines()[-1])["weights_sha256"] for one in (whole, parts)]
    assert digests[0] == digests[1]
