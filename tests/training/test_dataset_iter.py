"""DatasetIter in this process: skipped samples, refused settings, and bits that do not depend on the reader."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weftplan as mx
from tests.training.data_sources import Fickle, Growing, Numbers, OnlyIterable, labels, noisy, rows
from weftplan.errors import DataError, DTypeError, MXNetError, ParameterError


def test_samples_that_cannot_be_read(caplog):
    """Bad samples raise by default, and the next batch follows; or they are skipped, counted, reported and padded."""
    it = mx.io.DatasetIter(Numbers(6, 2, "raise"), 2)
    assert labels(it.next()) == [0, 1]
    with pytest.raises(DataError, match="sample 2 cannot be read: ValueError: this one is broken") as error:
        it.next()
    assert isinstance(error.value.__cause__, ValueError)
    assert labels(it.next()) == [4, 5]
    it = mx.io.DatasetIter(Numbers(6, 2, "raise"), 2, on_error="skip")
    assert [(labels(b), b.pad, b.index.tolist()) for b in it] == [
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
    """A batch without a readable sample is skipped; a dataset without one, or an empty dataset, is refused."""

    def odd(sample):
        if sample[1] in (0, 2, 3):
            raise OSError("truncated")
        return sample

    it = mx.io.DatasetIter(Numbers(6), 2, transform=odd, on_error="skip")
    assert [labels(batch) for batch in it] == [[1, 1], [4, 5]]
    assert it.skipped == 3
    with pytest.raises(DataError, match="none of 2 samples can be read; sample 0 cannot be read: OSError: truncated"):
        mx.io.DatasetIter([(0, 2), (0, 3)], 2, transform=odd, on_error="skip")
    with pytest.raises(DataError, match="sample 0 cannot be read"):
        mx.io.DatasetIter([(0, 2)], 2, transform=odd)
    for empty in ([], iter([])):
        with pytest.raises(DataError, match="no sample"):
            mx.io.DatasetIter(empty, 2, label_names=())


def test_a_stream_that_raises():
    """An exception of the iterator ends it and cannot be skipped; an exception of the transform can."""

    def broken():
        yield from ([n] for n in range(3))
        raise OSError("the line is down")

    it = mx.io.DatasetIter(broken, 2, label_names=(), on_error="skip")
    assert rows(it.next()) == [[[0], [1]]]
    with pytest.raises(DataError, match="the source ends at sample 3: OSError: the line is down"):
        it.next()


@pytest.mark.parametrize("workers", [0, 1])
def test_other_shapes(workers):
    """A sample of another shape is an error, whatever is to be skipped, and says both shapes."""
    with mx.io.DatasetIter(Numbers(6, 3, "shape"), 2, on_error="skip", num_workers=workers) as it:
        it.next()
        with pytest.raises(DataError, match=r"sample 3: 'data' has shape \(3,\), expected \(2,\) as in the first"):
            it.next()
        assert labels(it.next()) == [4, 5]


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
    """A sample whose structure differs from the first sample's is named."""
    with pytest.raises(DataError, match=f"sample 1.*({says})"):
        mx.io.DatasetIter([(np.zeros(2), 1), second], 2).next()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_changes_its_length(workers):
    """It is told at the next epoch, with both numbers; the epoch that runs is left alone."""
    source = Growing(4)
    with mx.io.DatasetIter(source, 2, label_names=(), num_workers=workers) as it:
        it.next()
        source.count = 6
        assert rows(it.next()) == [[[2, 2], [3, 3]]]
        with pytest.raises(DataError, match="had 4 samples when this iterator was made and has 6 now"):
            it.reset()
        with pytest.raises(StopIteration):
            it.next()


class Short:
    """An iterable that says that it is longer."""

    def __init__(self, *items):
        self.items = items

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return 7


def test_lengths_that_are_not_so():
    """An iterable that ends elsewhere than its length says, and workers that count otherwise."""

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
    """Every sample that can be read comes once, in an order of the seed, with numbers of its own; padding repeats."""
    mx.random.seed(seed)
    source = Numbers(samples, bad, "raise")
    if samples == 1 and bad == 0:
        return
    it = mx.io.DatasetIter(
        source, batch, shuffle=shuffle, last_batch_handle=handle, transform=noisy, on_error="skip", dtype="float64"
    )
    results, noise = [], []
    for one in it:
        got = labels(one)
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
    """Zero to three workers give the same batches, epochs and states, samples that are left out included."""
    runs = []
    for workers in (0, 1, 3):
        mx.random.seed(12)
        with mx.io.DatasetIter(
            Numbers(21, 9, "raise"), 4, shuffle=shuffle, transform=noisy, on_error="skip", num_workers=workers
        ) as it:
            results = []
            for _ in range(2):
                results += [(rows(b), labels(b), b.pad, b.index.tolist(), it.state()) for b in it]
                it.reset()
            runs.append((results, it.skipped))
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][1] == 2


def test_workers_of_a_stream():
    """Each worker takes its own batches of an iterable; the batches stay the same."""
    expected = [labels(b) for b in mx.io.DatasetIter(dict(enumerate(Numbers(11)[n] for n in range(11))).values(), 2)]
    source = [Numbers(11)[n] for n in range(11)]
    with mx.io.DatasetIter(OnlyIterable(source), 2, num_workers=2) as it:
        for _ in range(2):
            assert [labels(b) for b in it] == expected
            it.reset()


def test_the_process_keeps_its_own_numbers():
    """Reading in this process seeds generators for each sample, and restores their state."""
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
    """Bad settings are refused when the iterator is created; the error says what was expected."""
    with pytest.raises(ParameterError, match=says):
        mx.io.DatasetIter(**{"source": Numbers(4), "batch_size": 2, **settings})


def test_parts_that_are_no_numbers():
    """Text in the first sample is refused by its name."""
    with pytest.raises(DTypeError, match=r"'data' of the first sample: expected numbers, got ndarray of dtype <U4"):
        mx.io.DatasetIter([("text", 1)], 1)


def test_it_trains():
    """fit takes it as any iterator, and learns."""
    rng = np.random.default_rng(0)
    data, label = rng.standard_normal((64, 4)).astype("float32"), np.arange(64) % 2
    data[:, 0] += 4 * label
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2), name="softmax")
    module = mx.mod.Module(net)
    with mx.io.DatasetIter(list(zip(data, label, strict=True)), 16, shuffle=True) as it:
        module.fit(it, num_epoch=8, optimizer_params={"learning_rate": 0.5})
        assert module.score(it, "acc")[0][1] > 0.9
