"""``mx.image`` and ``ImageRecordIter``: MXNet's pixels without random settings, seeded augmentation, and bad images."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import FormatError, MXNetError, ParameterError, ShapeError

pytest.importorskip("PIL")
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
_SPEC = importlib.util.spec_from_file_location("image_cases", GOLDEN / "image_cases.py")
assert _SPEC is not None
assert _SPEC.loader is not None
cases: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cases)
PIXELS = cases.PIXELS


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    """Return the arrays that MXNet computed, by name."""
    with np.load(GOLDEN / "data" / "images.npz") as archive:
        return dict(archive)


def test_functions_give_what_mxnet_gives(stored: dict[str, Any]) -> None:
    """Resizing, borders, crops and rotation equal MXNet's: bytes within 1, floats within 1e-3."""
    actual = cases.images(mx)
    assert {f"images/{key}" for key in actual} == {key for key in stored if key.startswith("images/")}
    for key, value in actual.items():
        want = stored[f"images/{key}"]
        assert value.dtype == want.dtype, key
        most = 1 if want.dtype == np.uint8 or key == "augmenters" else 1e-3
        np.testing.assert_allclose(value.astype(float), want.astype(float), rtol=0, atol=most, err_msg=key)


def test_records_give_what_mxnet_gives(stored: dict[str, Any], tmp_path: Path) -> None:
    """Two epochs under each setting equal MXNet's: labels exactly, pixels within 1, or 6 if interpolated."""
    actual = cases.records(mx, tmp_path)
    assert {f"records/{key}" for key in actual} == {key for key in stored if key.startswith("records/")}
    for key, value in actual.items():
        want = stored[f"records/{key}"]
        most = 0 if "data" not in key else 6 if key.startswith(("turned", "larger")) else 1
        np.testing.assert_allclose(value, want, rtol=0, atol=most, err_msg=key)


def test_files_and_bytes_become_the_same_image(tmp_path: Path) -> None:
    """imread and imdecode return exactly a PNG's pixels; grey, channel order and ``out`` are as requested."""
    content = cases.png(PIXELS)
    path = tmp_path / "image.png"
    path.write_bytes(content)
    for image in (mx.image.imread(path), mx.image.imdecode(content), mx.img.image.imdecode(bytearray(content))):
        assert image.dtype == np.uint8
        np.testing.assert_array_equal(image.asnumpy(), PIXELS)
    np.testing.assert_array_equal(mx.image.imdecode(content, to_rgb=0).asnumpy(), PIXELS[:, :, ::-1])
    grey = mx.image.imdecode(content, flag=0).asnumpy()
    assert grey.shape == (13, 17, 1)
    np.testing.assert_allclose(grey[:, :, 0], PIXELS @ [0.299, 0.587, 0.114], atol=1)
    out = mx.nd.zeros((13, 17, 3), dtype="uint8")
    mx.image.imdecode(content, out=out)
    np.testing.assert_array_equal(out.asnumpy(), PIXELS)
    with pytest.raises(ShapeError, match="out has shape"):
        mx.image.imdecode(content, out=mx.nd.zeros((2, 2, 3)))


def test_deep_and_transparent_images() -> None:
    """Of 16 bits the upper eight are used, transparency is ignored, and EXIF rotation is applied."""
    import io

    from PIL import Image

    def content(picture: Any, kind: str = "PNG", **settings: Any) -> bytes:
        held = io.BytesIO()
        picture.save(held, kind, **settings)
        return held.getvalue()

    deep = np.full((3, 4), 0x1234, np.uint16)
    assert set(mx.image.imdecode(content(Image.fromarray(deep))).asnumpy().ravel()) == {0x12}
    clear = Image.fromarray(np.dstack([PIXELS, np.zeros((13, 17), np.uint8)]), "RGBA")
    np.testing.assert_array_equal(mx.image.imdecode(content(clear)).asnumpy(), PIXELS)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by a quarter
    assert mx.image.imdecode(content(Image.fromarray(PIXELS), "JPEG", exif=exif)).shape == (17, 13, 3)


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    """Empty, truncated or other content, a missing file, and invalid arguments raise their own errors."""
    for content in (b"", b"clearly not an image", cases.png(PIXELS)[:80]):
        with pytest.raises(FormatError, match="image"):
            mx.image.imdecode(content)
    path = tmp_path / "page.jpg"
    path.write_text("<html>")
    with pytest.raises(FormatError, match=r"page\.jpg.*a page of HTML"):
        mx.image.imread(path)
    with pytest.raises(MXNetError, match="cannot be read"):
        mx.image.imread(tmp_path / "missing.jpg")
    with pytest.raises(ParameterError, match="expected bytes"):
        mx.image.imdecode("text")
    with pytest.raises(ParameterError, match="interp"):
        mx.image.imresize(mx.nd.array(PIXELS), 3, 3, interp=7)
    with pytest.raises(ParameterError, match="outside"):
        mx.image.fixed_crop(mx.nd.array(PIXELS), 10, 0, 8, 3)


def test_random_functions_draw_from_the_seed() -> None:
    """One seed gives the same crops, rotations and jitters, another seed others; a crop is a part of the image.

    Without settings nothing is drawn.
    """
    assert [type(aug).__name__ for aug in mx.image.CreateAugmenter((3, 8, 8))] == ["CenterCropAug", "CastAug"]
    image = mx.nd.array(PIXELS)

    def draws(seed: int) -> list[Any]:
        mx.random.seed(seed)
        crop, box = mx.image.random_crop(image, (5, 4))
        sized, inner = mx.image.random_size_crop(image, (6, 6), 0.3, (0.75, 1.3))
        turned = mx.image.random_rotate(image.transpose((2, 0, 1)), (-20, 20))
        augs = mx.image.CreateAugmenter(
            (3, 8, 8), resize=10, rand_crop=True, rand_resize=True, rand_mirror=True, brightness=0.2, contrast=0.2,
            saturation=0.2, hue=0.2, pca_noise=0.1, rand_gray=0.5, mean=True, inter_method=10,
        )  # fmt: skip
        whole = mx.image.image.imresize(image, 40, 40)
        for aug in augs:
            whole = aug(whole)
        x, y, w, h = box
        np.testing.assert_array_equal(crop.asnumpy(), PIXELS[y : y + h, x : x + w])
        assert sized.shape == (6, 6, 3)
        assert whole.shape == (8, 8, 3)
        return [crop.asnumpy(), box, inner, turned.asnumpy(), whole.asnumpy()]

    first, repeated, second = draws(1), draws(1), draws(2)
    for left, right in zip(first, repeated, strict=True):
        np.testing.assert_array_equal(left, right)
    assert any(not np.array_equal(left, right) for left, right in zip(first, second, strict=True))


def test_jitters_do_what_they_say() -> None:
    """Brightness scales all pixels; contrast keeps the mean grey; saturation and hue keep each pixel's grey."""
    image = mx.nd.array(np.random.RandomState(1).uniform(50, 200, (6, 5, 3)))
    grey = np.array([0.299, 0.587, 0.114])
    before = image.asnumpy()
    bright = mx.image.BrightnessJitterAug(0.5)(image).asnumpy() / before
    np.testing.assert_allclose(bright, bright[0, 0, 0], rtol=1e-5)
    contrast = mx.image.ContrastJitterAug(0.5)(image).asnumpy()
    np.testing.assert_allclose((contrast @ grey).mean(), (before @ grey).mean(), rtol=1e-5)
    saturated = mx.image.SaturationJitterAug(0.5)(image).asnumpy()
    np.testing.assert_allclose(saturated @ grey, before @ grey, rtol=1e-5)
    np.testing.assert_allclose(mx.image.HueJitterAug(0.5)(image).asnumpy() @ grey, before @ grey, rtol=0.01)
    flat = mx.image.RandomGrayAug(1.0)(image).asnumpy()
    np.testing.assert_allclose(flat[..., 0], flat[..., 2])
    np.testing.assert_array_equal(mx.image.HorizontalFlipAug(1.0)(image).asnumpy(), before[:, ::-1])
    for aug in (mx.image.RandomOrderAug([mx.image.CastAug()]), mx.image.ColorJitterAug(0.1, 0, 0.1)):
        assert aug.dumps()[0] == type(aug).__name__.lower()
        assert aug(image).shape == image.shape


def folder_of_images(tmp_path: Path, count: int = 16) -> list[list[Any]]:
    """Write images whose pixels equal their number; return [label, file name] of each."""
    results = []
    for k in range(count):
        pixels = np.full((9, 10, 3), k, np.uint8)
        (tmp_path / f"{k}.png").write_bytes(cases.png(pixels))
        results.append([float(k), f"{k}.png"])
    return results


def label_numbers(batches: Any) -> list[list[int]]:
    """Return the labels of each batch, after a check that the pixels equal them."""
    results = []
    for batch in batches:
        data, label = batch.data[0].asnumpy(), batch.label[0].asnumpy()
        np.testing.assert_array_equal(data[:, 0, 0, 0], label)
        results.append([int(one) for one in label])
    return results


def test_image_iter_ends_in_each_way(tmp_path: Path) -> None:
    """The last batch is padded with the first images, discarded or moved to the next epoch.

    Images come from a list in memory or a list file, and ``num_parts`` selects a part.
    """
    images = folder_of_images(tmp_path)
    listed = tmp_path / "images.lst"
    listed.write_text("".join(f"{k}\t{label}\t{name}\n" for k, (label, name) in enumerate(images)))
    for source in ({"imglist": images}, {"path_imglist": listed}):
        common: dict[str, Any] = {"batch_size": 3, "data_shape": (3, 8, 8), "path_root": tmp_path, **source}
        padded = mx.image.ImageIter(**common, last_batch_handle="pad")
        rows = label_numbers(padded)
        assert rows[-1] == [15, 0, 1]
        assert len(rows) == 6
        padded.reset()
        assert [batch.pad for batch in padded] == [0, 0, 0, 0, 0, 2]
        assert len(label_numbers(mx.image.ImageIter(**common, last_batch_handle="discard"))) == 5
        rolled = mx.image.ImageIter(**common, last_batch_handle="roll_over")
        assert len(label_numbers(rolled)) == 5
        rolled.reset()
        assert label_numbers(rolled)[0] == [15, 0, 1]
        part = mx.image.ImageIter(**common, num_parts=2, part_index=1)
        assert label_numbers(part)[0] == [8, 9, 10]
        mx.random.seed(5)
        shuffled = label_numbers(mx.image.ImageIter(**common, shuffle=True))
        assert sorted(n for row in shuffled[:5] for n in row) != list(range(15))


def test_image_iter_names_the_image_that_is_none(tmp_path: Path) -> None:
    """A broken image raises with its path, a bad list with its line; invalid arguments raise, too."""
    images = folder_of_images(tmp_path, 3)
    (tmp_path / "1.png").write_bytes(b"nothing")
    iterator = mx.image.ImageIter(3, (3, 8, 8), imglist=images, path_root=tmp_path)
    with pytest.raises(FormatError, match=r"1\.png"):
        iterator.next()
    (tmp_path / "bad.lst").write_text("0\t1\tx.png\nzero\n")
    with pytest.raises(FormatError, match="line 2"):
        mx.image.ImageIter(3, (3, 8, 8), path_imglist=tmp_path / "bad.lst")
    with pytest.raises(ShapeError, match="data_shape"):
        mx.image.ImageIter(3, (1, 8, 8), imglist=images)
    with pytest.raises(ParameterError, match="needs path_imgrec"):
        mx.image.ImageIter(3, (3, 8, 8))


def write_number_records(path: Path, count: int = 10, *, labels: int = 1, index: bool = False) -> Path:
    """Write ``count`` images whose pixels equal their number to a record file; return its path.

    Args:
        labels: number of labels of each image.
        index: also write an index file with the suffix ``.idx``.
    """
    file: Any
    if index:
        file = mx.recordio.MXIndexedRecordIO(path.with_suffix(".idx"), path, "w")
    else:
        file = mx.recordio.MXRecordIO(path, "w")
    for k in range(count):
        label = float(k) if labels == 1 else [float(k)] * labels
        record = mx.recordio.pack_img((0, label, k, 0), np.full((12, 12, 3), k, np.uint8), quality=9, img_fmt=".png")
        file.write_idx(k, record) if index else file.write(record)
    file.close()
    return path


def test_record_iter_does_not_depend_on_threads(tmp_path: Path) -> None:
    """Random augmentation gives the same bits with one and four threads; either seed changes them."""
    path = cases.write_records(mx, tmp_path)
    settings: dict[str, Any] = {
        "data_shape": (3, 12, 14), "batch_size": 3, "shuffle": True, "rand_crop": True, "rand_mirror": True,
        "max_rotate_angle": 10, "max_shear_ratio": 0.1, "max_aspect_ratio": 0.1, "min_random_scale": 0.9,
        "max_random_scale": 1.2, "random_h": 10, "random_s": 40, "random_l": 50, "pca_noise": 0.1, "brightness": 0.1,
        "contrast": 0.1, "saturation": 0.1, "max_random_contrast": 0.1, "max_random_illumination": 3, "pad": 4,
        "inter_method": 10,
    }  # fmt: skip

    def epochs(**more: Any) -> Any:
        iterator = mx.io.ImageRecordIter(path, **settings, **more)
        first = np.concatenate([batch.data[0].asnumpy() for batch in iterator])
        iterator.reset()
        return np.concatenate([first, *(batch.data[0].asnumpy() for batch in iterator)])

    one = epochs(preprocess_threads=1, prefetch_buffer=1)
    np.testing.assert_array_equal(one, epochs(preprocess_threads=4))
    assert not np.array_equal(one, epochs(seed_aug=1))
    assert not np.array_equal(one, epochs(seed=1))
    sized = mx.io.ImageRecordIter(
        path, (3, 12, 14), 7, random_resized_crop=True, min_random_area=0.3, max_random_area=0.9, min_aspect_ratio=0.7,
        max_aspect_ratio=1.4,
    )  # fmt: skip
    assert sized.next().data[0].shape == (7, 3, 12, 14)


def test_record_iter_has_the_labels_it_is_told(tmp_path: Path) -> None:
    """Labels come from the record or a list file, one or several per image; uint8 and grey images are read, too."""
    path = write_number_records(tmp_path / "a.rec", index=True)
    common: dict[str, Any] = {"data_shape": (3, 12, 12), "batch_size": 5}
    plain = mx.io.ImageRecordIter(path, **common)
    assert plain.provide_label[0].shape == (5,)
    assert label_numbers(plain) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert label_numbers(mx.io.ImageRecordIter(path, path_imgidx=path.with_suffix(".idx"), **common)) == label_numbers(
        mx.io.ImageRecordIter(path, **common)
    )
    halves = [label_numbers(mx.io.ImageRecordIter(path, num_parts=2, part_index=k, **common)) for k in range(2)]
    assert halves == [[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9]]]
    listed = tmp_path / "a.lst"
    listed.write_text("".join(f"{k}\t{k * 10}\t{k}.png\n" for k in range(10)))
    batch = mx.io.ImageRecordIter(path, path_imglist=listed, **common).next()
    np.testing.assert_array_equal(batch.label[0].asnumpy(), [0, 10, 20, 30, 40])
    wide = mx.io.ImageRecordIter(write_number_records(tmp_path / "b.rec", labels=4), label_width=4, **common)
    assert wide.next().label[0].shape == (5, 4)
    with pytest.raises(ShapeError, match="label_width"):
        mx.io.ImageRecordIter(tmp_path / "b.rec", **common).next()
    raw = mx.io.ImageRecordUInt8Iter(path, mean_r=3, **common).next().data[0]
    assert raw.dtype == np.uint8
    assert raw.asnumpy()[1].max() == 1
    assert mx.io.ImageRecordIter(path, (1, 12, 12), 2).next().data[0].shape == (2, 1, 12, 12)


SIGNED_BYTES: list[tuple[dict[str, Any], list[list[int]]]] = [
    ({}, [[127, 127, 78], [10, 47, 127], [127, 33, 127]]),
    ({"scale": 0.5, "std_r": 2.0}, [[127, 127, 78], [10, 47, 127], [127, 33, 127]]),
    (
        {"mean_r": 100.4, "mean_g": 100.6, "mean_b": 210.0, "scale": 0.5},
        [[72, 116, -22], [-91, -54, 50], [-83, -128, 41]],
    ),
    ({"mean_r": 0.5, "mean_g": 1.5, "mean_b": 2.5}, [[127, 127, 77], [8, 45, 127], [124, 30, 127]]),
]
"""Settings, and the bytes that MXNet 1.9.1 computes from the pixels of the test below."""


@pytest.mark.parametrize(("settings", "expected"), SIGNED_BYTES)
def test_signed_bytes_are_limited(tmp_path: Path, settings: dict[str, Any], expected: list[list[int]]) -> None:
    """int8 pixels are the pixels minus the rounded mean, clipped; scale and std have no effect."""
    pixels = np.array([[172, 216, 78], [10, 47, 151], [127, 33, 251]], np.uint8).T[None]
    path = tmp_path / "a.rec"
    file = mx.recordio.MXRecordIO(path, "w")
    file.write(mx.recordio.pack_img((0, 1.0, 0, 0), pixels[:, :, ::-1], img_fmt=".png"))
    file.close()
    for iterator in (
        mx.io.ImageRecordInt8Iter,
        lambda *args, **named: mx.io.ImageRecordIter(*args, dtype="int8", **named),
    ):
        data = iterator(path, (3, 1, 3), 1, **settings).next().data[0]
        assert data.dtype == np.int8
        np.testing.assert_array_equal(data.asnumpy()[0, :, 0], expected)


def test_the_mean_image_is_computed_once(tmp_path: Path) -> None:
    """If the mean file is missing, it is computed and written; the next iterator reads it."""
    path, mean = write_number_records(tmp_path / "a.rec"), tmp_path / "mean.bin"
    common: dict[str, Any] = {"data_shape": (3, 12, 12), "batch_size": 5, "mean_img": mean}
    first = mx.io.ImageRecordIter(path, **common).next().data[0].asnumpy()
    assert mx.nd.load(str(mean))["mean_img"].asnumpy()[0, 0, 0] == 4.5
    assert first[0, 0, 0, 0] == -4.5
    np.testing.assert_array_equal(mx.io.ImageRecordIter(path, **common).next().data[0].asnumpy(), first)
    with pytest.raises(ShapeError, match="mean"):
        mx.io.ImageRecordIter(path, **{**common, "data_shape": (3, 8, 8)})


def test_record_iter_says_what_is_wrong(tmp_path: Path) -> None:
    """Truncated files, records without images, images that are too small, and invalid settings raise or warn."""
    path = write_number_records(tmp_path / "a.rec")
    (tmp_path / "short.rec").write_bytes(path.read_bytes()[:-7])
    with pytest.raises(FormatError, match="truncated"):
        mx.io.ImageRecordIter(tmp_path / "short.rec", (3, 12, 12), 2)
    (tmp_path / "text.rec").write_bytes(b"no records at all")
    with pytest.raises(FormatError, match="record"):
        mx.io.ImageRecordIter(tmp_path / "text.rec", (3, 12, 12), 2)
    file = mx.recordio.MXRecordIO(tmp_path / "noise.rec", "w")
    file.write(mx.recordio.pack((0, 1.0, 0, 0), b"no image"))
    file.close()
    with pytest.raises(FormatError, match="record 0"):
        mx.io.ImageRecordIter(tmp_path / "noise.rec", (3, 12, 12), 1).next()
    with pytest.warns(UserWarning, match="rand_mirror"):
        mx.io.ImageRecordIter(path, (3, 12, 12), 2, rand_miror=True)
    with pytest.raises(ParameterError, match="min_random_scale"):
        mx.io.ImageRecordIter(path, (3, 12, 12), 2, min_random_scale=2.0)
    with pytest.raises(ParameterError, match="interp"):
        mx.io.ImageRecordIter(path, (3, 12, 12), 2, inter_method=8)


def test_images_go_into_records_and_come_back() -> None:
    """Packing as PNG and unpacking returns the same BGR or grey pixels and label; JPEG differs by less than 4."""
    blue_first = PIXELS[:, :, ::-1]
    header, pixels = mx.recordio.unpack_img(mx.recordio.pack_img((0, 3.0, 1, 0), blue_first, 9, ".png"))
    assert header.label == 3
    np.testing.assert_array_equal(pixels, blue_first)
    np.testing.assert_array_equal(mx.image.imdecode(cases.png(PIXELS)).asnumpy(), pixels[:, :, ::-1])
    _, grey = mx.recordio.unpack_img(mx.recordio.pack_img((0, 3.0, 1, 0), PIXELS[:, :, 0], 9, ".png"))
    np.testing.assert_array_equal(grey, PIXELS[:, :, 0])
    smooth = np.add.outer(np.arange(24), np.arange(24)).astype(np.uint8)[..., None].repeat(3, 2)
    _, near = mx.recordio.unpack_img(mx.recordio.pack_img((0, [1.0, 2.0], 1, 0), smooth), 1)
    assert np.abs(near.astype(int) - smooth).max() < 4
    with pytest.raises(ParameterError, match="img_fmt"):
        mx.recordio.pack_img((0, 1.0, 0, 0), PIXELS, img_fmt=".gif")


def test_training_reads_records(tmp_path: Path) -> None:
    """A Module that trains on a record file reaches accuracy 1."""
    data = mx.sym.FullyConnected(mx.sym.Flatten(mx.sym.Variable("data")), num_hidden=2)
    net = mx.sym.SoftmaxOutput(data, name="softmax")
    path = tmp_path / "a.rec"
    file = mx.recordio.MXRecordIO(path, "w")
    for k in range(16):
        file.write(mx.recordio.pack_img((0, float(k % 2), k, 0), np.full((8, 8, 3), 200 * (k % 2), np.uint8)))
    file.close()
    iterator = mx.io.ImageRecordIter(path, (3, 8, 8), 4, shuffle=True, mean_r=100, mean_g=100, mean_b=100, scale=0.01)
    module = mx.mod.Module(net)
    module.fit(iterator, num_epoch=3, optimizer_params={"learning_rate": 0.1})
    assert module.score(iterator, "acc")[0][1] == 1.0


def test_older_names_of_the_readers():
    """MXNet's names with the suffix ``_v1`` are aliases of the current readers."""
    assert mx.io.ImageRecordIter_v1 is mx.io.ImageRecordIter
    assert mx.io.ImageRecordUInt8Iter_v1 is mx.io.ImageRecordUInt8Iter


def test_small_images_are_enlarged(tmp_path):
    """An image smaller than data_shape is enlarged to its height, then its width, as in MXNet; empty paths are none."""
    path = str(tmp_path / "small.rec")
    writer = mx.recordio.MXRecordIO(path, "w")
    sizes = [(10, 30), (30, 10), (8, 8), (40, 40)]
    pictures = [np.random.default_rng(k).integers(0, 256, (*size, 3)).astype(np.uint8) for k, size in enumerate(sizes)]
    for number, picture in enumerate(pictures):
        header = mx.recordio.IRHeader(0, float(number), number, 0)
        writer.write(mx.recordio.pack_img(header, picture[..., ::-1], img_fmt=".png"))
    writer.close()
    nowhere = {"path_imgidx": "", "path_imglist": "", "mean_img": ""}
    batches = mx.io.ImageRecordIter(path, (3, 20, 24), 4, inter_method=0, **nowhere)
    got = next(batches).data[0].asnumpy().transpose(0, 2, 3, 1)
    for picture, (height, width), ours in zip(pictures, sizes, got, strict=True):
        steps = [(20, 20 * width // height)] if height < 20 else []
        height, width = steps[-1] if steps else (height, width)
        steps += [(24 * height // width, 24)] if width < 24 else []
        wanted = picture
        for rows, columns in steps:
            wanted = mx.image.imresize(mx.nd.array(wanted, dtype="uint8"), columns, rows, interp=0).asnumpy()
        top, left = (wanted.shape[0] - 20) // 2, (wanted.shape[1] - 24) // 2
        np.testing.assert_array_equal(ours, wanted[top : top + 20, left : left + 24])
    cropped = mx.io.ImageRecordIter(path, (3, 20, 24), 4, rand_crop=True, resize=12, **nowhere)
    assert next(cropped).data[0].shape == (4, 3, 20, 24)
