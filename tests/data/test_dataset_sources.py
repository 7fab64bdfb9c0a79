"""DatasetIter reads every kind of source and sample."""

from __future__ import annotations

import collections

import numpy as np
import pytest

import weftplan as mx
from tests.data.data_sources import Numbers, data_lists, label_list
from weftplan.errors import DataError, NotResumableError, ParameterError


class OnlyDLPack:
    """A tensor of another library that only DLPack can read; unless it is on the CPU, only after ``cpu()``."""

    def __init__(self, values, where="cpu"):
        self._values, self._where = values, where

    def __dlpack__(self, **kwargs):
        if self._where != "cpu":
            raise BufferError("not on the host")
        return self._values.__dlpack__()

    def __dlpack_device__(self):
        return (1, 0) if self._where == "cpu" else (2, 0)

    def cpu(self):
        return self._values


class Together(Numbers):
    """Dataset that can read several samples in one call, like Hugging Face datasets; it records the calls."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def __getitems__(self, numbers):
        self.calls.append(numbers)
        return [self[number] for number in numbers]


SAMPLES = {
    "array": (np.arange(2, dtype="float32"), {"label_names": ()}),
    "pair": ((np.arange(2, dtype="int64"), 3), {}),
    "list of lists": ([[0.0, 1.0], [2]], {}),
    "list of numbers": ([0, 1], {"label_names": ()}),
    "dictionary": ({"softmax_label": 3, "data": [0, 1]}, {}),
    "renamed": ({"y": 3, "x": [0, 1], "more": "text"}, {"data_names": {"x": "data"}, "label_names": {"y": "l"}}),
    "dlpack": ((OnlyDLPack(np.arange(2.0)), 1), {}),
    "dlpack elsewhere": ((OnlyDLPack(np.arange(2.0), "gpu"), 1), {}),
    "ours": ((mx.nd.arange(2), mx.nd.array([1])), {}),
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_kinds_of_samples(kind):
    """Arrays, pairs, lists, dictionaries and tensors of other libraries give the same float32 batch."""
    sample, names = SAMPLES[kind]
    it = mx.io.DatasetIter([sample] * 3, 2, **names)
    assert [(d.name, d.shape, np.dtype(d.dtype)) for d in it.provide_data] == [("data", (2, 2), np.float32)]
    for batch in it:
        assert data_lists(batch) == [[[0, 1], [0, 1]]]
        assert len(batch.label) == len(it.provide_label)


def test_dtypes():
    """float64 and integers become float32 and float16 stays; ``dtype`` changes this for all parts or by name."""
    sample = {"a": np.zeros(1, "uint8"), "b": np.zeros(1, "float16"), "c": np.zeros(1, "float64")}

    def dtypes_with(dtype):
        it = mx.io.DatasetIter([sample], 1, data_names=["a", "b", "c"], label_names=(), dtype=dtype)
        assert [a.dtype for a in next(it).data] == [np.dtype(d.dtype) for d in it.provide_data]
        return [str(np.dtype(d.dtype)) for d in it.provide_data]

    assert dtypes_with(None) == ["float32", "float16", "float32"]
    assert dtypes_with("int32") == ["int32"] * 3
    assert dtypes_with({"a": "uint8"}) == ["uint8", "float16", "float32"]


SOURCES = {
    "list": lambda: [np.full(1, n) for n in range(5)],
    "array": lambda: np.arange(5.0).reshape(5, 1),
    "dictionary's values": lambda: {n: np.full(1, n) for n in range(5)}.values(),
    "generator": lambda: (np.full(1, n) for n in range(5)),
    "function": lambda: lambda: (np.full(1, n) for n in range(5)),
    "deque": lambda: collections.deque(np.full(1, n) for n in range(5)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_kinds_of_sources(kind):
    """Datasets, iterables and functions that return iterators give the same batches; a generator has one epoch."""
    it = mx.io.DatasetIter(SOURCES[kind](), 2, label_names=())
    it.reset()  # as fit does, before anything was read
    assert [(data_lists(b)[0], b.pad, b.index.tolist()) for b in it] == [
        ([[0], [1]], 0, [0, 1]),
        ([[2], [3]], 0, [2, 3]),
        ([[4], [4]], 1, [4, 4]),
    ]
    it.reset()
    if kind == "generator":
        with pytest.raises(DataError, match="gives its samples once"):
            it.next()
    else:
        assert len(list(it)) == 3


def test_a_dataset_that_reads_together():
    """``__getitems__`` is called once per batch; if it raises, samples are read singly to find the bad sample."""
    source = Together(5)
    assert [label_list(batch) for batch in mx.io.DatasetIter(source, 2)] == [[0, 1], [2, 3], [4, 4]]
    assert source.calls == [[0, 1], [2, 3], [4]]
    it = mx.io.DatasetIter(Together(5, 2, "raise"), 2, on_error="skip")
    assert [label_list(batch) for batch in it] == [[0, 1], [3, 3], [4, 4]]


def test_batches_that_come_ready():
    """With batch_size=None each item is a batch; a shorter batch is padded, and a longer batch raises."""
    parts = [(np.arange(k, k + n, dtype="float32")[:, None], np.arange(k, k + n)) for k, n in ((0, 3), (3, 3), (6, 1))]
    it = mx.io.DatasetIter(parts, None)
    assert it.provide_data[0].shape == (3, 1)
    assert [(label_list(b), b.pad) for b in it] == [([0, 1, 2], 0), ([3, 4, 5], 0), ([6, 6, 6], 2)]
    assert len(list(mx.io.DatasetIter(parts, None, last_batch_handle="discard"))) == 2
    for wrong, says in ((parts[0][0][:0], "0 samples"), (np.zeros((4, 1)), "4 samples, the first batch had 3")):
        it = mx.io.DatasetIter([parts[0], (wrong, np.zeros(len(wrong)))], None)
        it.next()
        with pytest.raises(DataError, match=says):
            it.next()
    with pytest.raises(DataError, match=r"parts of \{'data': 3, 'softmax_label': 2\} samples"):
        mx.io.DatasetIter([(np.zeros((3, 1)), np.zeros(2))], None)


class DataLoader:
    """A stand-in for PyTorch's class, which ``tests/data/test_torch_data.py`` uses if torch is installed."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return 2

    def __iter__(self):
        return iter([(np.zeros((2, 1)), np.zeros(2)), (np.ones((1, 1)), np.ones(1))])


DataLoader.__module__ = "torch.utils.data.dataloader"


def test_a_loader_of_batches():
    """A PyTorch DataLoader's items are batches, its workers are its own, and a random order cannot be saved."""
    result = {name: DataLoader(type(name, (), {})()) for name in ("SequentialSampler", "RandomSampler")}
    for name, loader in result.items():
        it = mx.io.DatasetIter(loader)
        assert [b.pad for b in it] == [0, 1]
        with pytest.raises(ParameterError, match="has workers of its own"):
            mx.io.DatasetIter(loader, num_workers=1)
        if name == "SequentialSampler":
            it.set_state(it.state())
        else:
            with pytest.raises(NotResumableError, match="does not say its order"):
                it.state()
