"""CSVIter, MNISTIter, ResizeIter and PrefetchingIter give the batches of MXNet 1.9.1 for the same files."""

import gzip
import struct

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import FormatError, ParameterError, ShapeError


def epoch(it):
    """Return (data, label, pad) of every batch."""
    actual = [(b.data[0].asnumpy().tolist(), b.label[0].asnumpy().tolist(), b.pad) for b in it]
    it.reset()
    return actual


def tables(folder):
    """Five rows of three numbers, and five labels."""
    (folder / "d.csv").write_text("".join(f"{3 * i},{3 * i + 1},{3 * i + 2}\n" for i in range(5)))
    (folder / "l.csv").write_text("".join(f"{i}\n" for i in range(5)))
    return {"data_csv": folder / "d.csv", "label_csv": folder / "l.csv", "data_shape": (3,), "batch_size": 2}


def row(i):
    """Row i of the table."""
    return [3.0 * i, 3.0 * i + 1, 3.0 * i + 2]


def test_tables_of_numbers(tmp_path):
    """The last batch borrows samples from the next epoch, which starts after them; round_batch=False starts over."""
    it = mx.io.CSVIter(**tables(tmp_path))
    first = [([row(0), row(1)], [0, 1], 0), ([row(2), row(3)], [2, 3], 0), ([row(4), row(0)], [4, 0], 1)]
    assert epoch(it) == first
    assert epoch(it) == [([row(1), row(2)], [1, 2], 0), ([row(3), row(4)], [3, 4], 0)]
    assert epoch(it) == first
    it = mx.io.CSVIter(**tables(tmp_path), round_batch=False)
    assert epoch(it) == epoch(it) == first
    bare = {**tables(tmp_path), "label_csv": None, "data_shape": (3, 1), "dtype": "int32"}
    it = mx.io.CSVIter(**bare)
    assert (it.provide_data[0].shape, it.provide_label[0].shape) == ((2, 3, 1), (2,))
    assert next(it).data[0].dtype == np.int32
    assert it.getdata().shape == (2, 3, 1)
    assert it.getlabel().asnumpy().tolist() == [0, 0]


def test_tables_that_do_not_fit(tmp_path):
    """Rows of another length, text, other numbers of labels, no batch: named."""
    good = tables(tmp_path)
    with pytest.raises(FormatError, match=r"5 rows of 3 numbers, shape \(4,\) needs 4"):
        mx.io.CSVIter(**{**good, "data_shape": (4,)})
    (tmp_path / "d.csv").write_text("a,b,c\n")
    with pytest.raises(FormatError, match=r"d.csv: no table of numbers"):
        mx.io.CSVIter(**good)
    (tmp_path / "d.csv").write_text("1,2,3\n")
    with pytest.raises(ShapeError, match="1 samples, but 5 labels"):
        mx.io.CSVIter(**good)
    with pytest.raises(ParameterError, match="batch_size must be at least 1"):
        mx.io.CSVIter(**{**good, "label_csv": None, "batch_size": 0})


@pytest.mark.parametrize("packed", [False, True])
def test_files_of_mnist(tmp_path, packed):
    """Pixels are 1/256ths, as rows or images; whole batches alone; a seeded order; damage is named."""
    pixels, labels = np.arange(20, dtype="u1").reshape(5, 2, 2), np.arange(5, dtype="u1")
    for name, values in (("im", pixels), ("lb", labels)):
        content = struct.pack(f">I{values.ndim}I", 0x800 | values.ndim, *values.shape) + values.tobytes()
        (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
    files = {"image": tmp_path / "im", "label": tmp_path / "lb", "batch_size": 2}
    it = mx.io.MNISTIter(**files, shuffle=False, flat=True)
    assert it.provide_data[0].shape == (2, 4)
    actual = epoch(it)
    assert [label for _, label, _ in actual] == [[0, 1], [2, 3]]
    assert actual[0][0][1] == [4 / 256, 5 / 256, 6 / 256, 7 / 256]
    assert mx.io.MNISTIter(**files).provide_data[0].shape == (2, 1, 2, 2)
    orders = [epoch(mx.io.MNISTIter(**files, seed=seed)) for seed in (1, 1, 2, 3, 4)]
    assert orders[0] == orders[1]
    assert any(order != orders[0] for order in orders)
    with pytest.raises(FormatError, match="expected a file of MNIST with 3 dimensions"):
        mx.io.MNISTIter(**{**files, "image": tmp_path / "lb"})
    (tmp_path / "im").write_bytes(struct.pack(">4I", 0x803, 5, 2, 2) + bytes(7))
    with pytest.raises(FormatError, match="needs 20 bytes, 7 follow"):
        mx.io.MNISTIter(**files)


def test_other_lengths_of_epochs():
    """ResizeIter resets the inner iterator in the middle of an epoch, or leaves its position."""
    inner = mx.io.NDArrayIter(np.arange(6.0), batch_size=2)
    it = mx.io.ResizeIter(inner, 5)
    assert [int(b.data[0].asnumpy()[0]) for b in it] == [0, 2, 4, 0, 2]
    it.reset()
    assert len(list(it)) == 5
    it = mx.io.ResizeIter(mx.io.NDArrayIter(np.arange(6.0), batch_size=2), 2, reset_internal=False)
    seen = []
    for _ in range(3):
        seen += [int(b.data[0].asnumpy()[0]) for b in it]
        it.reset()
    assert seen == [0, 2, 4, 0, 2, 4]


def test_a_resized_epoch_has_a_current_batch():
    """As in MXNet, what ``iter_next`` has gone to is the other iterator's batch: data, labels, padding, numbers."""
    it = mx.io.ResizeIter(mx.io.NDArrayIter(np.arange(3.0), np.arange(3.0) + 5, batch_size=2), 4)
    with pytest.raises(ParameterError, match="ResizeIter: there is no batch yet; call next"):
        it.getdata()
    assert it.iter_next()
    assert it.iter_next()
    assert it.getdata()[0].asnumpy().tolist() == [2, 0]
    assert it.getlabel()[0].asnumpy().tolist() == [7, 5]
    assert it.getpad() == 1
    assert list(it.getindex()) == [2, 0]


def test_batches_made_ahead():
    """PrefetchingIter gives the batches of its iterators, side by side and renamed, in every epoch."""
    data = np.arange(8.0).reshape(4, 2)
    one, two = (mx.io.NDArrayIter(data * k, np.arange(4.0), batch_size=2) for k in (1, 10))
    it = mx.io.PrefetchingIter([one, two], [{"data": "a"}, {"data": "b"}], [{}, {"softmax_label": "other"}])
    assert [d.name for d in it.provide_data + it.provide_label] == ["a", "b", "softmax_label", "other"]
    for _ in range(2):
        batches = list(it)
        assert len(batches) == 2
        np.testing.assert_array_equal(batches[1].data[1].asnumpy(), data[2:] * 10)
        assert batches[1].label[0].asnumpy().tolist() == [2, 3]
        it.reset()
    short = mx.io.NDArrayIter(data[:2], batch_size=2)
    it = mx.io.PrefetchingIter([mx.io.NDArrayIter(data, batch_size=2), short])
    next(it)
    with pytest.raises(ShapeError, match="different numbers of batches"):
        next(it)
    with pytest.raises(ParameterError, match="at least one"):
        mx.io.PrefetchingIter([])
