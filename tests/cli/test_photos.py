"""``weftplan train`` and ``weftplan run`` on folders of images."""

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


def write_photos(folder: Path, classes: tuple[str, ...] = ("hell", "dünkel"), each: int = 10) -> Path:
    """Write dark and bright images, a folder for each class; return ``folder``."""
    random = np.random.RandomState(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for k in range(each):
            pixels = np.clip(60 + 130 * number + random.randint(-30, 30, (20 + k % 3, 24, 3)), 0, 255).astype("u1")
            Image.fromarray(pixels).save(folder / name / f"bild {k}.{('png', 'jpg')[k % 2]}")
    return folder


def run(*args: Any) -> Result:
    """Run the command line and return click's result."""
    return CliRunner().invoke(main, [str(one) for one in args])


@pytest.fixture(scope="module")
def trained_network(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Train a network on images; return (image folder, prefix, output)."""
    folder = tmp_path_factory.mktemp("photos")
    images = write_photos(folder / "images")
    result = run(
        "train", "--data", images, "--network", "lenet", "--epochs", 6, "--batch-size", 4, "--devices", 1,
        "--checkpoint", folder / "net",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return images, folder / "net", result.output


def test_train_tells_classes_and_how_to_use_the_network(trained_network: tuple[Path, Path, str]) -> None:
    """Training splits the images by class, learns them, stores the class names, and prints a command to run."""
    _, prefix, printed = trained_network
    words = " ".join(printed.split())
    assert "16 training and 4 test images of 2 classes, 28x28 pixels; lenet, all layers new" in words
    assert "test accuracy 1.0000" in words
    assert f"weftplan run {prefix} 6 --input FOLDER --resize 28x28 --mean 127.5 --std 127.5" in words
    assert prefix.with_name("net-classes.txt").read_text(encoding="utf-8") == "dünkel\nhell\n"


def test_run_over_a_folder_writes_tables(trained_network: tuple[Path, Path, str], tmp_path: Path) -> None:
    """``run`` writes a row per image and rank, with class names; CSV and JSON agree for different batch sizes."""
    images, prefix, _ = trained_network
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


def test_broken_images_are_left_out(trained_network: tuple[Path, Path, str], tmp_path: Path) -> None:
    """A broken image is named and left out, the others have results, and the exit code is 1."""
    _, prefix, _ = trained_network
    images = write_photos(tmp_path / "images", each=2)
    (images / "hell" / "kaputt.jpg").write_bytes(b"no image")
    result = run("run", prefix, 6, "--input", images, "--resize", 28, *PIXELS, "-o", tmp_path / "a.npz")
    assert result.exit_code == 1
    assert "left out: " in result.output
    assert "kaputt.jpg: no image that can be read" in result.output
    with np.load(tmp_path / "a.npz") as actual:
        assert actual["softmax_output"].shape == (4, 2)


def test_fine_tuning_replaces_the_last_layer(trained_network: tuple[Path, Path, str], tmp_path: Path) -> None:
    """--from with another number of classes makes a new last layer; with --freeze only this layer changes."""
    _, prefix, _ = trained_network
    images = write_photos(tmp_path / "images", ("a", "b", "c"))
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


def test_fine_tuning_keeps_all_layers(trained_network: tuple[Path, Path, str], tmp_path: Path) -> None:
    """--from with the same number of classes keeps all layers; folders train and val are not split."""
    _, prefix, _ = trained_network
    for part, each in (("train", 8), ("val", 3)):
        write_photos(tmp_path / "images" / part, each=each)
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
    trained_network: tuple[Path, Path, str], tmp_path: Path, args: list[str], words: str
) -> None:
    """A wrong combination of options gives an error before training."""
    images, prefix, _ = trained_network
    write_photos(tmp_path / "one", ("x",))
    places = {"IMAGES": images, "NET": prefix, "ONE": tmp_path / "one"}
    result = run("train", *[places.get(one, one) for one in args])
    assert result.exit_code in (1, 2), result.output
    assert words in " ".join(result.output.split())


def test_run_needs_a_network_of_images(tmp_path: Path) -> None:
    """An empty folder, and CSV output of a network without class scores, are errors and write no file."""
    net = mx.sym.identity(mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=2, name="c"))
    module = mx.mod.Module(net, label_names=None)
    module.bind([("data", (1, 3, 8, 8))], for_training=False)
    module.init_params()
    module.save_checkpoint(tmp_path / "conv", 0)
    (tmp_path / "empty").mkdir()
    assert "no image is in this folder" in run("run", tmp_path / "conv", 0, "--input", tmp_path / "empty").output
    images = write_photos(tmp_path / "images", each=1)
    result = run("run", tmp_path / "conv", 0, "--input", images, "--resize", 8, "-o", tmp_path / "x.csv")
    assert result.exit_code == 1
    assert "has no row of classes for each sample" in " ".join(result.output.split())
    assert not (tmp_path / "x.csv").exists()


def test_interrupted_run_goes_on(tmp_path: Path) -> None:
    """A second run under the prefix is refused; with --resume it ends with the bits of one run."""
    images = write_photos(tmp_path / "images")
    command = ["train", "--data", images, "--network", "lenet", "--batch-size", 4, "--devices", 1, "--json"]
    whole = run(*command, "--epochs", 2, "--checkpoint", tmp_path / "a")
    assert run(*command, "--epochs", 1, "--checkpoint", tmp_path / "b").exit_code == 0
    refused = run(*command, "--epochs", 2, "--checkpoint", tmp_path / "b")
    assert refused.exit_code == 1
    assert "pass --resume to go on from it" in " ".join(refused.output.split())
    parts = run(*command, "--epochs", 2, "--checkpoint", tmp_path / "b", "--resume")
    digests = [json.loads(one.output.splitlines()[-1])["weights_sha256"] for one in (whole, parts)]
    assert digests[0] == digests[1]


def test_train_names_all_unreadable_images(tmp_path: Path) -> None:
    """Training on damaged images exits with 1 and names all of them."""
    images = write_photos(tmp_path / "images")
    broken = [images / "hell" / "bild 0.png", images / "dünkel" / "bild 1.jpg"]
    for path in broken:
        path.write_bytes(path.read_bytes()[:100])
    result = run("train", "--data", images, "--network", "lenet", "--epochs", 1, "--batch-size", 4, "--devices", 1)
    assert result.exit_code == 1
    assert "2 images cannot be read; remove or replace" in result.output
    assert all(path.name in result.output for path in broken)


def test_report_records_epochs_of_unequal_length(tmp_path: Path) -> None:
    """The report has the last epoch, although epochs differ in length; the output recommends --checkpoint."""
    images = write_photos(tmp_path / "images", each=9)  # 14 images in batches of 4: 4, 3 and 4 batches
    result = run(
        "train", "--data", images, "--network", "lenet", "--epochs", 3, "--batch-size", 4, "--devices", 1,
        "--report", tmp_path / "report",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "--checkpoint PREFIX saves it" in result.output
    lanes = (tmp_path / "report" / "lanes.html").read_text(encoding="utf-8")
    assert "Nothing was recorded" not in lanes
    assert "conv1_backward" in lanes


@pytest.mark.parametrize("size", ["20", "2"])
def test_another_size_than_the_checkpoint_takes(trained_network: tuple[Path, Path, str], size: str) -> None:
    """A --resize that does not fit the checkpoint gives an error with the size that fits."""
    images, prefix, _ = trained_network
    result = run("train", "--data", images, "--from", prefix, 6, "--resize", size, "--epochs", 1)
    assert result.exit_code == 1
    assert f"--resize {size}x{size} does not fit; the checkpoint takes 28x28 pixels" in result.output


@pytest.mark.parametrize(("numbers", "said"), [("0", "no number may be 0"), ("1,0,1", "may be 0"), ("nan", "finite")])
def test_std_of_zero_or_nan(numbers: str, said: str, tmp_path: Path) -> None:
    """A --std of 0 or NaN is a usage error of ``train`` and ``run``."""
    for command in (["train", "--data", tmp_path], ["run", "net", "1", "--input", tmp_path]):
        result = run(*command, "--std", numbers)
        assert result.exit_code == 2
        assert said in result.output
