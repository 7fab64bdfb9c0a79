"""Cases of resized, bordered, rotated and augmented images, and of epochs of ``ImageRecordIter``.

The code runs in MXNet 1.9.1 and in weftplan.
"""

import os
import struct
import zlib

import numpy as np

PIXELS = np.random.RandomState(0).randint(0, 256, (13, 17, 3)).astype(np.uint8)
SIZES = ((7, 5), (30, 29), (17, 9), (9, 20), (8, 26))
"""Target sizes (width, height) for 17x13 pixels: smaller, larger, same width, narrower and higher, double height."""
RECORDS = {
    "plain": {},
    "v1": {},
    "resize": {"resize": 16},
    "normalized": {"mean_r": 10, "mean_g": 20, "mean_b": 30, "std_r": 2, "std_g": 3, "std_b": 4, "scale": 0.5},
    "pad": {"pad": 3, "fill_value": 9},
    "mirror": {"mirror": True},
    "turned": {"rotate": 30},
    "larger": {"min_random_scale": 1.5, "max_random_scale": 1.5},
    "crop": {"max_crop_size": 16, "min_crop_size": 16},
    **{f"method {k}": {"resize": 16, "inter_method": k} for k in (0, 2, 3, 4)},
}


def images(mx):
    """Return the results, by name, of ``mx.image`` functions that draw no random numbers."""
    by_name = {}
    bytes_, floats = mx.nd.array(PIXELS, dtype="uint8"), mx.nd.array(PIXELS, dtype="float32")
    for interp in range(5):
        for width, height in SIZES:
            by_name[f"{interp}/{width}x{height}"] = mx.image.imresize(bytes_, width, height, interp=interp).asnumpy()
            if interp < 4:
                sized = mx.image.imresize(floats, width, height, interp=interp)
                by_name[f"float {interp}/{width}x{height}"] = sized.asnumpy()
    for kind in range(5):
        result = mx.image.copyMakeBorder(bytes_, 1, 2, 3, 4, type=kind, values=[3, 4, 5])
        by_name[f"border {kind}"] = result.asnumpy()
    by_name["short"] = mx.image.resize_short(bytes_, 20, 9).asnumpy()
    by_name["centre"] = mx.image.center_crop(bytes_, (12, 8))[0].asnumpy()
    by_name["centre, larger"] = mx.image.center_crop(bytes_, (40, 30))[0].asnumpy()
    by_name["fixed"] = mx.image.fixed_crop(bytes_, 1, 2, 8, 6, (4, 4), 1).asnumpy()
    by_name["normalized"] = mx.image.color_normalize(
        floats + 0, mx.nd.array([1, 2, 3]), mx.nd.array([2, 3, 4])
    ).asnumpy()
    turned = mx.nd.array(PIXELS.transpose(2, 0, 1), dtype="float32")
    for name, zoom in (("turned", {}), ("turned in", {"zoom_in": True}), ("turned out", {"zoom_out": True})):
        by_name[name] = mx.image.imrotate(turned, 25, **zoom).asnumpy()
    for augmenter in mx.image.CreateAugmenter((3, 10, 11), resize=12, mean=True, std=np.array([1.0, 2.0, 3.0])):
        bytes_ = augmenter(bytes_)
    by_name["augmenters"] = bytes_.asnumpy()
    return by_name


def png(pixels):
    """Return the bytes of a PNG file with these RGB pixels."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def write_records(mx, folder):
    """Write seven PNG images of different sizes to a record file; return its path."""
    path = os.path.join(str(folder), "images.rec")
    random = np.random.RandomState(3)
    file = mx.recordio.MXRecordIO(path, "w")
    for k in range(7):
        pixels = random.randint(0, 256, (20 + k, 30 - k, 3)).astype(np.uint8)
        file.write(mx.recordio.pack(mx.recordio.IRHeader(0, float(k), k, 0), png(pixels)))
    file.close()
    return path


def records(mx, folder):
    """Return labels and padding of two epochs of ``ImageRecordIter``, and data of the first, for each of the settings.

    Samples that are padding are left out.
    """
    path = write_records(mx, folder)
    by_name = {}
    for name, settings in RECORDS.items():
        iterator = getattr(mx.io, "ImageRecordIter_v1" if name == "v1" else "ImageRecordIter")(
            path_imgrec=path, data_shape=(3, 12, 14), batch_size=3, preprocess_threads=1, **settings
        )
        for epoch in range(2):
            data, labels, pads = [], [], []
            for batch in iterator:
                pads.append(batch.pad or 0)
                kept = 3 - pads[-1]
                data.append(batch.data[0].asnumpy()[:kept])
                labels.append(batch.label[0].asnumpy()[:kept])
            iterator.reset()
            if epoch == 0:
                by_name[f"{name}/data"] = np.concatenate(data)
            by_name[f"{name}/labels {epoch}"] = np.concatenate(labels)
            by_name[f"{name}/pads {epoch}"] = np.array(pads)
    return by_name
