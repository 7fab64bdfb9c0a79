"""DatasetIter reads datasets and loaders of PyTorch and Hugging Face, if these are installed."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import NotResumableError


def batch_values(it):
    """Return (data, label, pad) of each batch of an epoch."""
    return [(b.data[0].tolist(), b.label[0].tolist(), b.pad) for b in it]


EXPECTED = [
    ([[0, 1], [2, 3]], [0, 1], 0),
    ([[4, 5], [6, 7]], [2, 3], 0),
    ([[8, 9], [8, 9]], [4, 4], 1),
]


@pytest.fixture
def tensors():
    """Return a TensorDataset of five samples."""
    torch = pytest.importorskip("torch")
    return torch.utils.data.TensorDataset(torch.arange(10.0).reshape(5, 2), torch.arange(5))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_of_torch(tensors, workers):
    """A TensorDataset gives the expected batches, with and without workers."""
    with mx.io.DatasetIter(tensors, 2, num_workers=workers) as it:
        assert batch_values(it) == EXPECTED


def test_tensors_that_need_gradients():
    """A tensor with requires_grad=True is read."""
    torch = pytest.importorskip("torch")
    samples = [torch.ones(2, requires_grad=True)] * 2
    assert mx.io.DatasetIter(samples, 2, label_names=()).next().data[0].tolist() == [[1, 1], [1, 1]]


def test_an_iterable_dataset_of_torch():
    """An IterableDataset is read as a stream, although it inherits __getitem__."""
    torch = pytest.importorskip("torch")

    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.arange(3.0))

    it = mx.io.DatasetIter(Numbers(), 2, label_names=())
    assert [b.data[0].tolist() for b in it] == [[0, 1], [2, 2]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_of_torch(tensors, workers):
    """A DataLoader gives its batches; its position can be saved unless it shuffles."""
    torch = pytest.importorskip("torch")
    it = mx.io.DatasetIter(torch.utils.data.DataLoader(tensors, 2, num_workers=workers))
    assert batch_values(it) == EXPECTED
    it.reset()
    it.next()
    second = mx.io.DatasetIter(torch.utils.data.DataLoader(tensors, 2))
    second.set_state(it.state())
    assert batch_values(second) == EXPECTED[1:]
    shuffled = mx.io.DatasetIter(torch.utils.data.DataLoader(tensors, 2, shuffle=True))
    assert sorted(n for _, labels, pad in batch_values(shuffled) for n in labels[: 2 - pad]) == [0, 1, 2, 3, 4]
    with pytest.raises(NotResumableError):
        shuffled.state()


class Noise:
    """Dataset of random samples drawn by torch."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return sys.modules["torch"].rand(2)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_torch_draws_by_the_seed_of_the_sample():
    """torch's random numbers in samples do not depend on workers; the caller's generator is unchanged."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(5)
    alone = [torch.rand(1).item() for _ in range(2)]
    torch.manual_seed(5)
    first = torch.rand(1).item()
    runs = []
    for workers in (0, 1):
        mx.random.seed(1)
        with mx.io.DatasetIter(Noise(), 2, label_names=(), num_workers=workers, start_method="fork") as it:
            runs.append([b.data[0].tolist() for b in it])
    assert runs[0] == runs[1]
    assert len({str(row) for batch in runs[0] for row in batch}) == 4
    assert [first, torch.rand(1).item()] == alone


@pytest.mark.parametrize("kind", ["plain", "numpy", "stream"])
def test_a_dataset_of_hugging_face(kind):
    """A Hugging Face dataset gives the expected batches: its columns are mapped by name."""
    datasets = pytest.importorskip("datasets")
    result = datasets.Dataset.from_dict({"x": np.arange(10.0).reshape(5, 2), "y": list(range(5))})
    source = {"plain": result, "numpy": result.with_format("numpy"), "stream": result.to_iterable_dataset()}[kind]
    names = {"data_names": {"x": "data"}, "label_names": {"y": "softmax_label"}}
    it = mx.io.DatasetIter(source, 2, **names)
    assert batch_values(it) == EXPECTED
    it.reset()
    assert batch_values(it) == EXPECTED
    if kind != "stream":
        with mx.io.DatasetIter(source, 2, num_workers=1, **names) as it:
            assert batch_values(it) == EXPECTED
