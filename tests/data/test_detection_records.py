"""``ImageDetRecordIter``: labels and pixels of MXNet 1.9.1 without random settings; boxes follow the pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.data.images.detection_record_augment import DetAugmentation, augment_boxes
from weftplan.errors import FormatError, ParameterError

pytest.importorskip("PIL")
SIZES = [(20, 30, 1), (40, 16, 3), (24, 24, 2), (18, 50, 1), (30, 30, 1)]


def write_records(folder: Path, first_id: int = 0) -> Path:
    """Write five images with one to three boxes each, whose ids count from ``first_id``; return the record file."""
    path = folder / "det.rec"
    file = mx.recordio.MXRecordIO(path, "w")
    random = np.random.RandomState(0)
    for number, (height, width, count) in enumerate(SIZES):
        pixels = random.randint(0, 255, (height, width, 3)).astype("u1")
        boxes: list[float] = []
        for _ in range(count):
            a, b = np.sort(random.rand(2)), np.sort(random.rand(2))
            boxes += [random.randint(0, 5), a[0], b[0], a[1], b[1]]
        header = mx.recordio.IRHeader(0, np.array([2, 5, *boxes], "f"), first_id + number, 0)
        file.write(mx.recordio.pack_img(header, pixels, quality=6, img_fmt=".png"))
    file.close()
    return path


FIRST = [2, 5, 2, 0.26460000872612, 0.1949000060558319, 0.4632999897003174, 0.5755000114440918]
"""The label of the first image, as MXNet 1.9.1 reads it."""


@pytest.mark.parametrize(
    ("settings", "sizes", "means"),
    [
        # the sizes in the first batch's labels, and the means of its images, from MXNet 1.9.1
        ({}, [(12, 16)] * 3, [124.804, 125.693, 127.835]),
        ({"mean_r": 10, "std_r": 2, "scale": 0.5}, [(12, 16)] * 3, [51.285, 51.631, 52.209]),
        ({"resize_mode": "shrink", "mean_r": 10}, [(10, 16), (12, 4), (12, 12)], [100.491, 27.986, 92.738]),
        ({"resize_mode": "fit"}, [(10, 16), (12, 4), (12, 12)], [103.825, 31.319, 96.071]),
        ({"resize": 14}, [(12, 16)] * 3, [125.056, 125.63, 127.637]),
        ({"label_pad_width": 30, "label_pad_value": -2}, [(12, 16)] * 3, [124.804, 125.693, 127.835]),
    ],
)
def test_batches_of_mxnet(
    tmp_path: Path, settings: dict[str, Any], sizes: list[tuple[int, int]], means: list[float]
) -> None:
    """A label is (channels, height, width, count, numbers, padding); pixel means are within 0.9 of MXNet's."""
    actual = mx.io.ImageDetRecordIter(write_records(tmp_path), (3, 12, 16), 3, **settings)
    width = 4 + settings.get("label_pad_width", 17)
    assert actual.provide_label == [("softmax_label", (3, width))]
    batches = list(actual)
    assert [(batch.pad, batch.index.tolist()) for batch in batches] == [(0, [0, 1, 2]), (1, [3, 4, 0])]
    labels = batches[0].label[0].asnumpy()
    assert labels[:, :4].tolist() == [[3, *size, count] for size, count in zip(sizes, (7, 17, 12), strict=True)]
    np.testing.assert_allclose(labels[0, 4:11], FIRST, atol=1e-4)
    assert set(labels[0, 11:]) == {settings.get("label_pad_value", -1)}
    np.testing.assert_allclose(batches[0].data[0].asnumpy().mean((1, 2, 3)), means, atol=0.9)


def test_mirrored_boxes_of_mxnet(tmp_path: Path) -> None:
    """Mirroring swaps and reflects the left and right edges of a box."""
    plain, turned = (
        mx.io.ImageDetRecordIter(write_records(tmp_path), (3, 12, 16), 3, rand_mirror_prob=share).next()
        for share in (0, 1)
    )
    np.testing.assert_array_equal(plain.data[0].asnumpy()[:, :, :, ::-1], turned.data[0].asnumpy())
    a, b = plain.label[0].asnumpy()[0, 6:11], turned.label[0].asnumpy()[0, 6:11]
    np.testing.assert_allclose(b, [a[0], 1 - a[3], a[2], 1 - a[1], a[4]], atol=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_boxes_stay_on_their_pixels(seed: int) -> None:
    """After cropping, padding, mirroring and resizing, a bright rectangle is at its box within 5 of 200 pixels."""
    draw = np.random.Generator(np.random.Philox(seed))
    pixels = np.zeros((80, 100, 3), np.uint8)
    pixels[24:56, 30:70] = 255
    box = np.array([[1, 0.3, 0.3, 0.7, 0.7]], np.float32)
    settings = DetAugmentation(
        rand_crop_prob=1, min_crop_scales=0.4, max_crop_scales=1.0, min_crop_aspect_ratios=0.5,
        max_crop_aspect_ratios=2.0, rand_pad_prob=1, max_pad_scale=2.0, rand_mirror_prob=0.5, fill_value=0,
    )  # fmt: skip
    actual, boxes = augment_boxes(pixels, box, settings, (3, 200, 200), draw)
    assert actual.shape == (3, 200, 200)
    ((kind, left, top, right, bottom),) = boxes
    assert kind == 1
    rows, columns = np.nonzero(actual[0] > 127)
    np.testing.assert_allclose([left * 200, right * 200], [columns.min(), columns.max() + 1], atol=5)
    np.testing.assert_allclose([top * 200, bottom * 200], [rows.min(), rows.max() + 1], atol=5)


def test_limits_of_crops_hold() -> None:
    """A crop drops boxes outside it and clips the others; if no crop meets the limits, boxes stay unchanged."""
    boxes = np.array([[0, 0.1, 0.1, 0.3, 0.3], [1, 0.6, 0.6, 0.9, 0.9]], np.float32)
    pixels = np.zeros((50, 50, 3), np.uint8)
    kept = set()
    for seed in range(60):
        draw = np.random.Generator(np.random.Philox(seed))
        settings = DetAugmentation(
            rand_crop_prob=1, min_crop_scales=0.3, max_crop_scales=0.6, min_crop_object_coverages=0.9,
            crop_emit_mode="overlap", emit_overlap_thresh=0.5,
        )  # fmt: skip
        _, actual = augment_boxes(pixels, boxes, settings, (3, 50, 50), draw)
        kept.add(len(actual))
        assert actual.min() >= 0
        assert actual[:, 1:].max() <= 1
    assert kept == {1, 2}
    impossible = DetAugmentation(rand_crop_prob=1, min_crop_overlaps=0.99, min_crop_scales=0.1, max_crop_scales=0.2)
    _, actual = augment_boxes(pixels, boxes, impossible, (3, 50, 50), np.random.Generator(np.random.Philox(0)))
    np.testing.assert_array_equal(actual, boxes)


def test_wrong_settings_and_labels(tmp_path: Path) -> None:
    """A wrong setting raises or warns with its name; a wrong label raises with the record's number."""
    path = write_records(tmp_path)
    with pytest.raises(ParameterError, match="label_pad_width=5 is less than the 17 numbers of the longest label"):
        mx.io.ImageDetRecordIter(path, (3, 12, 16), 3, label_pad_width=5)
    with pytest.raises(ParameterError, match="resize_mode must be one of force, shrink, fit, got 'grow'"):
        mx.io.ImageDetRecordIter(path, (3, 12, 16), 3, resize_mode="grow")
    with pytest.raises(ParameterError, match="max_crop_scales must have a value for each of the 3 crop samplers"):
        mx.io.ImageDetRecordIter(path, (3, 12, 16), 3, num_crop_sampler=3, max_crop_scales=[1, 1])
    with pytest.warns(UserWarning, match="'rand_mirror' is no setting; did you mean 'rand_mirror_prob'"):
        mx.io.ImageDetRecordIter(path, (3, 12, 16), 3, rand_mirror=True)
    with pytest.raises(FormatError, match="record 0: a label of 7 numbers, label_width is 12"):
        mx.io.ImageDetRecordIter(path, (3, 12, 16), 3, label_width=12)
    plain = tmp_path / "plain.rec"
    file = mx.recordio.MXRecordIO(plain, "w")
    file.write(mx.recordio.pack_img((0, 3.0, 0, 0), np.zeros((4, 4, 3), np.uint8), 6, ".png"))
    file.close()
    with pytest.raises(FormatError, match=r"plain\.rec: record 0: a label of boxes begins with"):
        mx.io.ImageDetRecordIter(plain, (3, 12, 16), 1)


@pytest.mark.parametrize("kind", ["ImageDetRecordIter", "ImageRecordIter"])
def test_index_of_a_batch_holds_the_ids(tmp_path: Path, kind: str) -> None:
    """``DataBatch.index`` holds ids, as in MXNet 1.9.1, whose ``ImageRecordIter`` has only zeros there."""
    width = {"label_width": 7} if kind == "ImageRecordIter" else {}
    if width:
        file = mx.recordio.MXRecordIO(tmp_path / "det.rec", "w")
        for number in range(5):
            header = mx.recordio.IRHeader(0, np.arange(7, dtype="f"), 40 + number, 0)
            file.write(mx.recordio.pack_img(header, np.zeros((12, 16, 3), "u1"), img_fmt=".png"))
        file.close()
    else:
        write_records(tmp_path, 40)
    actual = getattr(mx.io, kind)(path_imgrec=tmp_path / "det.rec", data_shape=(3, 12, 16), batch_size=3, **width)
    assert [batch.index.tolist() for batch in actual] == [[40, 41, 42], [43, 44, 40]]
