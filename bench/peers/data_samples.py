"""Datasets of NumPy arrays for the benches of data loading; weftplan and PyTorch both can read them."""

import time

import numpy as np


class Images:
    """Images of 3x40x40 bytes, randomly cropped to 32x32, mirrored, and normalised to float32, as for CIFAR-10."""

    def __init__(self, count=4096):
        rng = np.random.default_rng(0)
        self.pixels = rng.integers(0, 256, (count, 3, 40, 40), dtype=np.uint8)
        self.labels = rng.integers(0, 10, count)

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, number):
        top, left, mirrored = np.random.randint(0, 9), np.random.randint(0, 9), np.random.random() < 0.5  # noqa: NPY002
        image = self.pixels[number, :, top : top + 32, left : left + 32].astype(np.float32)
        image -= 127.5
        image /= 64
        return np.ascontiguousarray(image[:, :, ::-1]) if mirrored else image, self.labels[number]


class Ready(Images):
    """The same bytes, cropped at one corner and not augmented, so that the time is that of the loader."""

    def __getitem__(self, number):
        return self.pixels[number, :, :32, :32], self.labels[number]


class Slow:
    """Images of 1x28x28 that each take ``seconds`` of CPU time if ``busy``, else of sleep, as from a disk."""

    def __init__(self, count, seconds, busy):
        self.count, self.seconds, self.busy = count, seconds, busy
        self.image = np.random.default_rng(0).random((1, 28, 28), dtype=np.float32)

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if self.busy:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                self.image.sum()
        else:
            time.sleep(self.seconds)
        return self.image, number % 10


DATASETS = {"images": Images, "ready": Ready}
