"""DatasetIter: unreadable samples, refused settings, and batches that do not depend on the number of workers."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weftplan as mx
from tests.data.data_sources import Fickle, Growing, Numbers, OnlyIterable, data_lists, label_list, noisy
from weftplan.errors import DataError, DTypeError, MXNetError, ParameterError


def test_samples_that_cannot_be_read(caplog):
    """An unreadable sample raises, or is skipped, counted, logged and replaced by padding with ``on_error="skip"``."""
    it = mx.io.DatasetIter(Numbers(6, 2, "raise"), 2)
    assert label_list(it.next()) == [0, 1]
    with pytest.raises(DataError, match="sample 2 cannot be read: ValueError: this one is broken") as error:
        it.next()
    assert isinstance(error.value.__cause__, ValueError)
    assert label_list(it.next()) == [4, 5]
    it = mx.io.DatasetIter(Numbers(6, 2, "raise"), 2, on_error="skip")
    assert [(label_list(b), b.pad, b.index.tolist()) for b in it] == [
        ([0, 1], 0, [0, 1]),
        ([3, 3], 1, [3, 3]),
        ([4, 5], 0, [4, 5]),
    ]
    assert it.skipped == 1
    assert [number for number, _ in it.skipped_samples] == [2]
    assert "left out what it cannot read: sample 2 cannot be read: ValueError: this one is broken" in caplog.text
    state = it.state()
    second = mx.io.DatasetIter(Numbers(6, 2, "raise"), 2, on_error="skip")
    second.set_state(state)
    assert second.skipped == 1


def test_nothing_of_a_batch_can_be_read():
    """A batch without a readable sample is skipped; a dataset that is empty or entirely unreadable raises."""

    def odd(sample):
        if sample[1] in (0, 2, 3):
            raise OSError("truncated")
        return sample

    it = mx.io.DatasetIter(Numbers(6), 2, transform=odd, on_error="skip")
    assert [label_list(batch) for batch in it] == [[1, 1], [4, 5]]
    assert it.skipped == 3
    with pytest.raises(DataError, match="none of 2 samples can be read; sample 0 cannot be read: OSError: truncated"):
        mx.io.DatasetIter([(0, 2), (0, 3)], 2, transform=odd, on_error="skip")
    with pytest.raises(DataError, match="sample 0 cannot be read"):
        mx.io.DatasetIter([(0, 2)], 2, transform=odd)
    for empty in ([], iter([])):
        with pytest.raises(DataError, match="no sample"):
            mx.io.DatasetIter(empty, 2, label_names=())


def test_a_stream_that_raises():
    """An exception of the source itself ends the epoch with an error even with ``on_error="skip"``."""

    def broken():
        yield from ([n] for n in range(3))
        raise OSError("the line is down")

    it = mx.io.DatasetIter(broken, 2, label_names=(), on_error="skip")
    assert data_lists(it.next()) == [[[0], [1]]]
    with pytest.raises(DataError, match="the source ends at sample 3: OSError: the line is down"):
        it.next()


@pytest.mark.parametrize("workers", [0, 1])
def test_other_shapes(workers):
    """A sample of another shape than the first raises even with ``on_error="skip"``; the error states both shapes."""
    with mx.io.DatasetIter(Numbers(6, 3, "shape"), 2, on_error="skip", num_workers=workers) as it:
        it.next()
        with pytest.raises(DataError, match=r"sample 3: 'data' has shape \(3,\), expected \(2,\) as in the first"):
            it.next()
        assert label_list(it.next()) == [4, 5]


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ((np.zeros(2),), "it has 1 parts, the first sample had 2"),
        (np.zeros(2), r"'data' has shape \(\), expected \(2,\)"),
        ({"data": 1}, "it has 1 parts, the first sample had 2"),
        ({"data": 1, "label": 1}, "has not the parts of the first sample"),
        ((np.zeros(2), np.array("text")), "'softmax_label' has dtype <U4, expected numbers"),
        ((np.zeros(2), [[1], [1, 2]]), "cannot be read"),
        (7, "int 7 has not the parts of the first sample"),
        (None, "cannot be read: ValueError: it is None"),
    ],
)
def test_other_parts(second, says):
    """A sample whose structure or dtype differs from the first sample's raises an error that names the difference."""
    with pytest.raises(DataError, match=f"sample 1.*({says})"):
        mx.io.DatasetIter([(np.zeros(2), 1), second], 2).next()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_changes_its_length(workers):
    """A changed length raises at ``reset`` with both lengths; the current epoch is not affected."""
    source = Growing(4)
    with mx.io.DatasetIter(source, 2, label_names=(), num_workers=workers) as it:
        it.next()
        source.count = 6
        assert data_lists(it.next()) == [[[2, 2], [3, 3]]]
        with pytest.raises(DataError, match="had 4 samples when this iterator was made and has 6 now"):
            it.reset()
        with pytest.raises(StopIteration):
            it.next()


class Short:
    """Iterable with a ``__len__`` of 7, whatever its number of items."""

    def __init__(self, *items):
        self.items = items

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return 7


def test_wrong_length():
    """An iterable shorter than its ``__len__``, and a dataset with another length in workers, raise DataError."""

    it = mx.io.DatasetIter(Short([0], [1], [2]), 2, label_names=())
    it.next()
    with pytest.raises(DataError, match="says that it has 7 items, but it ended after 3"):
        it.next()
    with (
        mx.io.DatasetIter(Fickle(4), 2, label_names=(), num_workers=1) as it,
        pytest.raises(DataError, match=r"has 4 samples here and \[5\] in workers"),
    ):
        it.next()


@given(
    samples=st.integers(1, 23),
    batch=st.integers(1, 6),
    shuffle=st.booleans(),
    handle=st.sampled_from(["pad", "discard"]),
    seed=st.integers(0, 5),
    bad=st.integers(0, 30),
)
@settings(max_examples=40)
def test_against_a_model(samples, batch, shuffle, handle, seed, bad):
    """Each readable sample comes once, except in a discarded last batch, with its own random numbers.

    Without shuffle the samples are in order; padding repeats the samples of the batch.
    """
    mx.random.seed(seed)
    source = Numbers(samples, bad, "raise")
    if samples == 1 and bad == 0:
        return
    it = mx.io.DatasetIter(
        source, batch, shuffle=shuffle, last_batch_handle=handle, transform=noisy, on_error="skip", dtype="float64"
    )
    results, noise = [], []
    for one in it:
        got = label_list(one)
        assert got == one.index.tolist()
        real = batch - one.pad
        assert got == [got[k % real] for k in range(batch)]
        assert one.data[0].tolist() == [one.data[0].tolist()[k % real] for k in range(batch)]
        results += got[:real]
        noise += one.data[0].tolist()[:real]
    whole = samples if handle == "pad" else samples // batch * batch
    left = {*range(samples)} - {bad}
    assert len({*results}) == len(results)
    assert {*results} <= left
    if whole == samples:
        assert {*results} == left
    if not shuffle:
        assert results == sorted(results)
    assert len({*noise}) == len(noise)


@pytest.mark.parametrize("shuffle", [False, True])
def test_same_bits_for_any_number_of_workers(shuffle):
    """0, 1 and 3 workers give the same batches, iterator states and number of skipped samples in two epochs."""
    runs = []
    for workers in (0, 1, 3):
        mx.random.seed(12)
        with mx.io.DatasetIter(
            Numbers(21, 9, "raise"), 4, shuffle=shuffle, transform=noisy, on_error="skip", num_workers=workers
        ) as it:
            results = []
            for _ in range(2):
                results += [(data_lists(b), label_list(b), b.pad, b.index.tolist(), it.state()) for b in it]
                it.reset()
            runs.append((results, it.skipped))
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][1] == 2


def test_workers_of_a_stream():
    """Two workers give the batches of an iterable in the same order as no worker, in each epoch."""
    expected = [
        label_list(b) for b in mx.io.DatasetIter(dict(enumerate(Numbers(11)[n] for n in range(11))).values(), 2)
    ]
    source = [Numbers(11)[n] for n in range(11)]
    with mx.io.DatasetIter(OnlyIterable(source), 2, num_workers=2) as it:
        for _ in range(2):
            assert [label_list(b) for b in it] == expected
            it.reset()


def test_the_process_keeps_its_own_numbers():
    """Reading in the main process leaves the global generators as they were; ``sample_rng`` outside reading raises."""
    it = mx.io.DatasetIter(Numbers(4), 2, transform=noisy)
    random.seed(1), np.random.seed(1)  # noqa: NPY002
    alone = [(random.random(), np.random.random()) for _ in range(3)]  # noqa: NPY002
    random.seed(1), np.random.seed(1)  # noqa: NPY002
    seen = []
    for _ in range(3):
        seen.append((random.random(), np.random.random()))  # noqa: NPY002
        next(it, None)
    assert seen == alone
    with pytest.raises(MXNetError, match="no sample is being read on this thread"):
        mx.io.sample_rng()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"batch_size": 2.0}, "batch_size must be"),
        ({"num_workers": -1}, "num_workers must be a whole number of at least 0"),
        ({"ahead": 0}, "ahead must be"),
        ({"deadline": 0}, "deadline must be seconds above 0"),
        ({"last_batch_handle": "roll_over"}, "must be 'pad' or 'discard'"),
        ({"on_error": "ignore"}, "must be 'raise' or 'skip'"),
        ({"ctx": mx.sim(0)}, r"makes batches on the host; let mx.io.PrefetchingIter bring them to sim\(0\)"),
        ({"label_names": ()}, "samples have 2 parts, but there are names for 1"),
        ({"data_names": 3}, "data_names must be names"),
        ({"source": 3}, "must have __len__ and __getitem__, be an iterable, or a function"),
        ({"source": "text"}, "must have __len__ and __getitem__"),
        ({"source": [{"x": 1, "y": 2}]}, r"no parts \['data', 'softmax_label'\]; they have \['x', 'y'\]"),
        ({"source": [np.zeros(2)], "data_names": ["a", "b"]}, "samples are single arrays"),
        ({"source": iter([1]), "shuffle": True}, "shuffle needs a dataset"),
    ],
)
def test_settings_that_do_not_fit(settings, says):
    """An invalid argument raises ParameterError at creation; the error says what was expected."""
    with pytest.raises(ParameterError, match=says):
        mx.io.DatasetIter(**{"source": Numbers(4), "batch_size": 2, **settings})


def test_parts_that_are_no_numbers():
    """Text in the first sample raises DTypeError with the name of the part."""
    with pytest.raises(DTypeError, match=r"'data' of the first sample: expected numbers, got ndarray of dtype <U4"):
        mx.io.DatasetIter([("text", 1)], 1)


def test_it_trains():
    """``fit`` and ``score`` take a DatasetIter, and the accuracy is above 0.9."""
    rng = np.random.default_rng(0)
    data, label = rng.standard_normal((64, 4)).astype("float32"), np.arange(64) % 2
    data[:, 0] += 4 * label
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2), name="softmax")
    module = mx.mod.Module(net)
    with mx.io.DatasetIter(list(zip(data, label, strict=True)), 16, shuffle=True) as it:
        module.fit(it, num_epoch=8, optimizer_params={"learning_rate": 0.5})
        assert module.score(it, "acc")[0][1] > 0.9
