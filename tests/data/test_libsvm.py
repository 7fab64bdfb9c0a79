"""LibSVMIter gives the batches of MXNet 1.9.1 as dense arrays; errors name invalid lines."""

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import FormatError, ParameterError, ShapeError

TEXT = "1.0 0:0.5 2:1.2\n-2.0\n-3.0 0:0.6 1:2.4 2:1.2\n4 2:-1.2\n5 1:7\n"
ROWS = np.array([[0.5, 0, 1.2], [0, 0, 0], [0.6, 2.4, 1.2], [0, 0, -1.2], [0, 7, 0]], "float32")
LABELS = [1, -2, -3, 4, 5]


def make_iterator(folder, text=TEXT, **settings):
    """Write ``text`` to a file and return an iterator over it."""
    path = folder / "d.t"
    path.write_text(text)
    return mx.io.LibSVMIter(path, **{"data_shape": (3,), "batch_size": 3, **settings})


def epoch(it):
    """Return (rows, labels, pad) of every batch, and reset the iterator."""
    actual = [(b.data[0].asnumpy(), b.label[0].asnumpy().tolist(), b.pad) for b in it]
    it.reset()
    return actual


def check(found, expected):
    """Check an epoch against ``expected``: (row numbers, pad) of each batch."""
    assert len(found) == len(expected)
    for (rows, labels, pad), (numbers, expected_pad) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(rows, ROWS[numbers])
        assert labels == [LABELS[k] for k in numbers]
        assert pad == expected_pad


def test_epochs(tmp_path):
    """The last batch takes samples of the next epoch, which then begins after them unless round_batch=False."""
    it = make_iterator(tmp_path)
    assert (it.provide_data[0].shape, it.provide_label[0].shape) == ((3, 3), (3,))
    check(epoch(it), [([0, 1, 2], 0), ([3, 4, 0], 1)])
    check(epoch(it), [([1, 2, 3], 0), ([4, 0, 1], 2)])
    check(epoch(it), [([2, 3, 4], 0)])
    it = make_iterator(tmp_path, round_batch=False)
    for _ in range(2):
        check(epoch(it), [([0, 1, 2], 0), ([3, 4, 0], 1)])


def test_labels_of_several_numbers(tmp_path):
    """Vector labels come from a label file; the first number of each line is ignored in both files."""
    (tmp_path / "l.t").write_text("1.0\n-2.0 0:0.125\n-3.0 2:1.2\n4 1:1.0 2:-1.2\n0 0:3\n")
    it = make_iterator(tmp_path, label_libsvm=tmp_path / "l.t", label_shape=(3,), batch_size=2)
    assert it.provide_label[0].shape == (2, 3)
    assert next(it).label[0].asnumpy().tolist() == [[0, 0, 0], [0.125, 0, 0]]
    (tmp_path / "l.t").write_text("1.0\n")
    with pytest.raises(ShapeError, match=r"d.t has 5 rows, .*l.t 1"):
        make_iterator(tmp_path, label_libsvm=tmp_path / "l.t", label_shape=(3,))


def test_what_else_lines_hold(tmp_path):
    """Weights, query ids, comments and empty lines are ignored; the last of repeated features is used."""
    it = make_iterator(tmp_path, "1:0.5 qid:3 1:1 1:2 # x\n\n# all\n2 2:1e3 0:-inf\n", batch_size=2)
    batch = next(it)
    assert batch.data[0].asnumpy().tolist() == [[0, 2, 0], [-np.inf, 0, 1000]]
    assert batch.label[0].asnumpy().tolist() == [1, 2]


def test_parts_and_folders(tmp_path):
    """A folder's files are read in order of name; ``num_parts`` splits the rows; an invalid part raises."""
    folder = tmp_path / "all"
    folder.mkdir()
    lines = TEXT.splitlines(keepends=True)
    (folder / "b.t").write_text("".join(lines[2:]))
    (folder / "a.t").write_text("".join(lines[:2]))
    check(epoch(mx.io.LibSVMIter(folder, (3,), batch_size=5)), [([0, 1, 2, 3, 4], 0)])
    settings = {"num_parts": 2, "batch_size": 2}
    check(epoch(make_iterator(tmp_path, part_index=0, **settings)), [([0, 1], 0)])
    it = make_iterator(tmp_path, part_index=1, **settings)
    check(epoch(it), [([2, 3], 0), ([4, 2], 1)])
    check(epoch(it), [([3, 4], 0)])
    for wrong in ({"part_index": 2}, {"num_parts": 6}):
        with pytest.raises(ParameterError, match=r"part_index 2 of num_parts 2|too few for num_parts=6"):
            make_iterator(tmp_path, **{**settings, **wrong})


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("1 0:1\n1 3:2\n", ShapeError, r"line 2 has feature 3, expected 0 to 2 .* needs \(4,\)"),
        ("1 -1:2\n", ShapeError, "feature -1"),
        ("1 0:1\nx 1:2\n", FormatError, "line 2 begins with 'x'"),
        ("1 0:1\n2 1.5:2\n", FormatError, "line 2 has '1.5:2', expected feature:value"),
        ("1 0:1 inf:2\n", FormatError, "line 1 has 'inf:2', expected feature:value"),
        ("1 nan:2\n", FormatError, "line 1 has 'nan:2', expected feature:value"),
        ("1 1e30:2\n", FormatError, "line 1 has '1e30:2'"),
        ("1 0:1 2\n", FormatError, "line 1 has '2'"),
        ("1 0:\n", FormatError, "line 1 has '0:'"),
        ("# nothing\n", FormatError, "no line"),
    ],
)
def test_lines_of_another_form(tmp_path, text, error, words):
    """A malformed line raises an error with the line number and the fault."""
    with pytest.raises(error, match=words):
        make_iterator(tmp_path, text)


def test_what_is_no_text(tmp_path):
    """Binary content and a ``data_shape`` of two axes raise."""
    (tmp_path / "d.t").write_bytes(b"\x93NUMPY\xff\xfe")
    with pytest.raises(FormatError, match="no text"):
        mx.io.LibSVMIter(tmp_path / "d.t", (3,))
    with pytest.raises(ShapeError, match=r"data_shape must be \(number,\), got \(3, 2\)"):
        make_iterator(tmp_path, data_shape=(3, 2))
