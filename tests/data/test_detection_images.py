"""Detection augmenters of ``mx.image`` and ``ImageDetIter``: boxes follow their objects; batches and label errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import FormatError, MXNetError, ShapeError

pytest.importorskip("PIL")
image = mx.image
BOX = np.array([[3, 0.25, 0.3, 0.6, 0.7]], np.float32)


def image_with_box(height: int = 60, width: int = 80) -> Any:
    """Return a black image with a white rectangle at :data:`BOX`."""
    pixels = np.zeros((height, width, 3), np.uint8)
    left, top, right, bottom = (BOX[0, 1:] * [width, height, width, height]).round().astype(int)
    pixels[top:bottom, left:right] = 255
    return mx.nd.array(pixels, dtype=np.uint8)


def white_bounds(pixels: Any) -> Any:
    """Return (left, top, right, bottom) of the white pixels as fractions of the image size."""
    rows, columns = np.nonzero(pixels.asnumpy()[:, :, 0] > 200)
    height, width = pixels.shape[:2]
    ends = columns.max() + 1, rows.max() + 1
    return np.array([columns.min() / width, rows.min() / height, ends[0] / width, ends[1] / height])


@pytest.mark.parametrize(
    "augmenter",
    [
        image.DetHorizontalFlipAug(1),
        image.DetRandomCropAug(0.2, (0.5, 2), (0.1, 1), 0.1),
        image.DetRandomCropAug(0, 1, (0.05, 0.5), 0.3),
        image.DetRandomPadAug((0.5, 2), (1, 4), 50, 7),
        image.CreateMultiRandCropAugmenter([0.1, 0.5], area_range=[(0.1, 1), (0.5, 1)]),
        image.DetBorrowAug(image.ForceResizeAug((50, 90), 0)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_boxes_stay_on_what_they_mark(augmenter: Any) -> None:
    """After each of thirty random augmentations the box is the bounds of the white rectangle, within a pixel."""
    changed = 0
    for seed in range(30):
        mx.random.seed(seed)
        label = BOX.copy()
        pixels, boxes = augmenter(image_with_box(), label)
        assert (label == BOX).all(), "the given boxes were written to"
        assert boxes.shape == (1, 5)
        assert boxes[0, 0] == 3
        np.testing.assert_allclose(boxes[0, 1:], white_bounds(pixels), atol=1.01 / min(pixels.shape[:2]))
        changed += pixels.shape != (60, 80, 3) or not np.array_equal(boxes, BOX)
    assert changed > 20


def test_crops_keep_what_they_promise() -> None:
    """A crop's area and ratio are in their ranges, and boxes that lose too much area are dropped.

    If no crop meets the conditions, the image and its boxes are returned unchanged.
    """
    two = np.array([[0, 0.0, 0.0, 0.3, 0.3], [1, 0.4, 0.4, 0.7, 0.7]], np.float32)
    crop = image.DetRandomCropAug(0, (0.5, 2), (0.1, 0.6), 0.5, 200)
    counts = set()
    for seed in range(40):
        mx.random.seed(seed)
        pixels, boxes = crop(image_with_box(200, 200), two)
        height, width = pixels.shape[:2]
        assert 0.09 <= height * width / 200**2 <= 0.61
        assert 0.48 <= width / height <= 2.1
        assert ((boxes[:, 1:] >= 0) & (boxes[:, 1:] <= 1)).all()
        counts.add(len(boxes))
    assert counts == {1, 2}
    uncropped, boxes = image.DetRandomCropAug(1.0, max_attempts=5)(image_with_box(), BOX)
    assert uncropped.shape == (60, 80, 3)
    assert boxes is BOX


def test_settings_that_do_nothing_are_said() -> None:
    """An augmenter whose ranges allow no change warns and returns its input; invalid arguments raise."""
    with pytest.warns(UserWarning, match="DetRandomPadAug does nothing"):
        pad = image.DetRandomPadAug(area_range=(1.0, 1.0))
    assert pad(image_with_box(), BOX)[1] is BOX
    with pytest.raises(MXNetError, match="lists of 2, 1, 3, 1, 1"):
        image.CreateMultiRandCropAugmenter([0.1, 0.2], area_range=[(0.1, 1)] * 3)
    with pytest.raises(TypeError, match="DetBorrowAug expects"):
        image.DetBorrowAug(image.DetHorizontalFlipAug(1))
    assert image.DetRandomSelectAug([])(image_with_box(), BOX)[1] is BOX


def test_the_usual_list_has_what_is_asked_for() -> None:
    """CreateDetAugmenter returns the requested augmenters in MXNet's order; each describes itself as JSON."""
    augs = image.CreateDetAugmenter(
        (3, 30, 30), resize=40, rand_crop=0.5, rand_pad=0.5, rand_gray=0.1, rand_mirror=True, mean=True, std=True,
        brightness=0.1, hue=0.1, pca_noise=0.1, min_object_covered=[0.1, 0.9],
    )  # fmt: skip
    names = [one.dumps()[0] if isinstance(one.dumps(), list) else json.loads(one.dumps())[0] for one in augs]
    assert names[:4] == ["detborrowaug", "detrandomselectaug", "dethorizontalflipaug", "detrandomselectaug"]
    assert names[4:] == ["detborrowaug"] * 7
    inner = [type(one.augmenter).__name__ for one in augs if isinstance(one, image.DetBorrowAug)]
    assert inner == [
        "ResizeAug", "ForceResizeAug", "CastAug", "ColorJitterAug", "HueJitterAug", "LightingAug", "RandomGrayAug",
        "ColorNormalizeAug",
    ]  # fmt: skip


@pytest.fixture
def image_list(tmp_path: Path) -> list[Any]:
    """Write five images and return (label, path) of each; a label has one to three boxes of six numbers."""
    from PIL import Image

    entries = []
    for k in range(5):
        path = tmp_path / f"{k}.png"
        Image.fromarray(image_with_box().asnumpy()).save(path)
        boxes = [number for j in range(k % 3 + 1) for number in (j, 0.1, 0.1, 0.5 + 0.1 * k, 0.9, 7)]
        entries.append([4, 6, -1, -1, *boxes, str(path)])
    return [[np.array(entry[:-1], np.float32), entry[-1]] for entry in entries]


@pytest.mark.parametrize(
    ("handle", "sizes", "second"), [("pad", [0, 0, 1], 3), ("discard", [0, 0], 2), ("roll_over", [0, 0], 3)]
)
def test_batches_of_boxes(image_list: list[Any], handle: str, sizes: list[int], second: int) -> None:
    """Labels are padded with -1 to the most boxes of an image; ``last_batch_handle`` decides the last batch."""
    batches = image.ImageDetIter(2, (3, 32, 32), imglist=image_list, last_batch_handle=handle)
    assert batches.label_shape == (3, 6)
    assert batches.provide_label[0].shape == (2, 3, 6)
    first = list(batches)
    assert [batch.pad for batch in first] == sizes
    label = first[0].label[0].asnumpy()
    np.testing.assert_allclose(label[0, 0], [0, 0.1, 0.1, 0.5, 0.9, 7], rtol=1e-6)
    assert (label[0, 1:] == -1).all()
    assert (label[1, :2, 5] == 7).all()
    assert first[0].data[0].shape == (2, 3, 32, 32)
    batches.reset()
    assert len(list(batches)) == second


def test_records_and_shapes(image_list: list[Any], tmp_path: Path) -> None:
    """A record file gives the same labels; ``sync_label_shape`` enlarges labels, and nothing can shrink them."""
    records = mx.recordio.MXIndexedRecordIO(str(tmp_path / "x.idx"), str(tmp_path / "x.rec"), "w")
    for k, (label, path) in enumerate(image_list[:2]):
        records.write_idx(k, mx.recordio.pack(mx.recordio.IRHeader(0, label, k, 0), Path(path).read_bytes()))
    records.close()
    small = image.ImageDetIter(1, (3, 20, 20), path_imgrec=tmp_path / "x.rec", path_imgidx=tmp_path / "x.idx")
    large = image.ImageDetIter(1, (3, 20, 20), imglist=image_list)
    np.testing.assert_array_equal(next(small).label[0].asnumpy()[0, 0], next(large).label[0].asnumpy()[0, 0])
    assert small.label_shape == (2, 6)
    assert large.sync_label_shape(small) is small
    assert small.label_shape == large.label_shape == (3, 6)
    small.reshape(data_shape=(3, 40, 30), label_shape=(4, 6))
    with pytest.raises(ShapeError, match="at least 4, 6"):
        small.reshape(label_shape=(2, 6))
    assert small.provide_label[0].shape == (1, 4, 6)
    assert small.provide_data[0].shape == (1, 3, 40, 30)


@pytest.mark.parametrize(
    "label",
    [
        [1.0],
        [2, 5],
        [2, 4, 0, 0, 0, 1],
        [2, 5, 0, 0.1, 0.1, 0.5],
        [2, 5, 0, 0.5, 0.5, 0.5, 0.9],
        [np.nan, 5, 0, 0, 0, 1, 1],
    ],
)
def test_a_label_that_is_no_list_of_boxes_names_its_image(image_list: list[Any], label: list[float]) -> None:
    """A label that is too short, has an incomplete or empty box, or has NaN raises with the image's path."""
    with pytest.raises(FormatError, match=r"image .*1\.png"):
        image.ImageDetIter(1, (3, 20, 20), imglist=[image_list[0], [np.array(label, np.float32), image_list[1][1]]])


def test_an_image_without_boxes_is_left_out(image_list: list[Any]) -> None:
    """An image whose boxes are all dropped by an augmenter is skipped."""

    class Drop(image.DetAugmenter):
        def __call__(self, src: Any, label: Any) -> Any:
            return src, label[:0] if len(label) == 1 else label

    batches = image.ImageDetIter(1, (3, 60, 80), imglist=image_list, aug_list=[Drop()])
    assert [int((batch.label[0].asnumpy()[0, :, 0] >= 0).sum()) for batch in batches] == [2, 3, 2]
