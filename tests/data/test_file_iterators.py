"""CSVIter, MNISTIter, ResizeIter and PrefetchingIter give the same batches as MXNet 1.9.1."""

import gzip
import struct

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import FormatError, ParameterError, ShapeError


def epoch(it):
    """Return (data, label, pad) of every batch, and reset the iterator."""
    actual = [(b.data[0].asnumpy().tolist(), b.label[0].asnumpy().tolist(), b.pad) for b in it]
    it.reset()
    return actual


def write_tables(folder):
    """Write five rows of three numbers and five labels as CSV; return the arguments of CSVIter."""
    (folder / "d.csv").write_text("".join(f"{3 * i},{3 * i + 1},{3 * i + 2}\n" for i in range(5)))
    (folder / "l.csv").write_text("".join(f"{i}\n" for i in range(5)))
    return {"data_csv": folder / "d.csv", "label_csv": folder / "l.csv", "data_shape": (3,), "batch_size": 2}


def row(i):
    """Return row ``i`` of the data table."""
    return [3.0 * i, 3.0 * i + 1, 3.0 * i + 2]


def test_tables_of_numbers(tmp_path):
    """The last batch takes samples of the next epoch, which then begins after them unless round_batch=False."""
    it = mx.io.CSVIter(**write_tables(tmp_path))
    first = [([row(0), row(1)], [0, 1], 0), ([row(2), row(3)], [2, 3], 0), ([row(4), row(0)], [4, 0], 1)]
    assert epoch(it) == first
    assert epoch(it) == [([row(1), row(2)], [1, 2], 0), ([row(3), row(4)], [3, 4], 0)]
    assert epoch(it) == first
    it = mx.io.CSVIter(**write_tables(tmp_path), round_batch=False)
    assert epoch(it) == epoch(it) == first
    bare = {**write_tables(tmp_path), "label_csv": None, "data_shape": (3, 1), "dtype": "int32"}
    it = mx.io.CSVIter(**bare)
    assert (it.provide_data[0].shape, it.provide_label[0].shape) == ((2, 3, 1), (2,))
    assert next(it).data[0].dtype == np.int32
    assert it.getdata().shape == (2, 3, 1)
    assert it.getlabel().asnumpy().tolist() == [0, 0]


def test_tables_that_do_not_fit(tmp_path):
    """A wrong row length, text, a wrong number of labels and a batch size of 0 raise errors that name them."""
    good = write_tables(tmp_path)
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
    """MNISTIter scales pixels by 1/256, drops an incomplete batch and shuffles by seed; a damaged file raises."""
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
    """ResizeIter repeats its inner iterator for longer epochs; with reset_internal=False a short epoch continues it."""
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
    """After ``iter_next`` the get methods return the inner iterator's current batch; before it they raise."""
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
    """PrefetchingIter merges the batches of its iterators under new names; different numbers of batches raise."""
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
