"""PrefetchingIter gives the same batches and random numbers at any depth, and changes no other draw."""

import threading

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import ParameterError


class Drawing(mx.io.DataIter):
    """An iterator over ten random batches from ``mx.random``; it records the threads that read it."""

    def __init__(self):
        super().__init__(2)
        self.provide_data, self.provide_label = [("data", (2,))], []
        self.at, self.threads = 0, set()

    def reset(self):
        self.at = 0

    def state(self):
        return {"iterator": "Drawing", "of": {}, "at": self.at}

    def set_state(self, state):
        self.at = state["at"]

    def next(self):
        self.threads.add(threading.current_thread())
        if self.at == 10:
            raise StopIteration
        self.at += 1
        return mx.io.DataBatch([mx.nd.random.uniform(shape=(2,))])


@pytest.mark.parametrize("depth", [1, 2, 12])
def test_draws_of_what_is_read_ahead(depth):
    """Random batches depend on the seed alone, at any depth, and leave the caller's random numbers unchanged.

    An iterator with a restored state gives the remaining batches.
    """
    mx.random.seed(4)
    with mx.io.PrefetchingIter(Drawing(), depth=1) as it:
        expected = [batch.data[0].asnumpy().tolist() for batch in it]
    mx.random.seed(4)
    alone = [mx.nd.random.uniform(shape=(1,)).asscalar() for _ in range(10)]
    mx.random.seed(4)
    with mx.io.PrefetchingIter(Drawing(), depth=depth) as it, mx.io.PrefetchingIter(Drawing(), depth=depth) as second:
        seen, drawn = [], []
        for batch in it:
            if len(seen) == 4:
                state = it.state()
            seen.append(batch.data[0].asnumpy().tolist())
            drawn.append(mx.nd.random.uniform(shape=(1,)).asscalar())
        second.set_state(state)
        remaining = [batch.data[0].asnumpy().tolist() for batch in second]
    assert seen == expected
    assert remaining == expected[5:]
    assert drawn == alone
    assert len({str(row) for row in expected}) == 10


def test_shuffling_in_the_middle_of_an_epoch():
    """If the reader thread resets a shuffled iterator, the orders are the same at any depth."""

    def order(depth):
        mx.random.seed(6)
        inner = mx.io.NDArrayIter(np.arange(4.0), batch_size=2, shuffle=True)
        with mx.io.PrefetchingIter(mx.io.ResizeIter(inner, 8), depth=depth) as it:
            return [(batch.data[0].asnumpy().tolist(), mx.random.next_key(mx.cpu())) for batch in it]

    assert order(1) == order(5)


def test_buckets_keep_their_keys():
    """Prefetched batches keep their bucket keys; their shapes have the new names."""
    rows = mx.rnn.BucketSentenceIter([[1, 2], [1, 2], [1, 2, 3], [1, 2, 3]], 2)
    with mx.io.PrefetchingIter(rows, [{"data": "words"}]) as it:
        assert it.default_bucket_key == 3
        by_name = {batch.bucket_key: batch.provide_data for batch in it}
    assert {key: (descs[0].name, descs[0].shape) for key, descs in by_name.items()} == {
        2: ("words", (2, 2)),
        3: ("words", (2, 3)),
    }


def test_one_thread_which_ends():
    """One thread reads all batches; it exits on ``close``, or when the iterator is deleted."""
    for close in (True, False):
        source = Drawing()
        it = mx.io.PrefetchingIter(source, depth=3)
        list(it)
        it.reset()
        if close:
            it.close()
        del it
        (thread,) = source.threads
        thread.join(60)
        assert not thread.is_alive()


def test_wrong_use():
    """An invalid depth, getdata before iter_next and an invalid state raise, and the iterator still works."""
    source = mx.io.NDArrayIter(np.arange(4.0), batch_size=2)
    for depth in (0, -1, 1.5, True):
        with pytest.raises(ParameterError, match="depth must be a whole number"):
            mx.io.PrefetchingIter(source, depth=depth)
    with mx.io.PrefetchingIter(source) as it:
        with pytest.raises(ParameterError, match="no batch yet"):
            it.getdata()
        assert it.iter_next()
        assert it.getdata()[0].asnumpy().tolist() == [0, 1]
        assert (it.getlabel(), it.getpad(), it.getindex().tolist()) == ([], 0, [0, 1])
        state = it.state()
        for bad in ([], [{}], [{"source": None, "draws": [1], "ended": False}]):
            with pytest.raises(ParameterError):
                it.set_state({**state, "of_iters": bad})
        assert it.next().data[0].asnumpy().tolist() == [2, 3]
