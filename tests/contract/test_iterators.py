"""Contract of data iterators: epochs, their ends, and resumption from states."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

import weftplan as mx
from tests.contract.iterators import ITERATORS, arrays
from weftplan.errors import MXNetError, NotResumableError, ParameterError

Seen = list[tuple[Any, ...]]


def contents(batch: mx.io.DataBatch) -> tuple[Any, ...]:
    """Return the contents of a batch as plain values."""
    index = None if batch.index is None else batch.index.tolist()
    return ([a.tolist() for a in batch.data], [a.tolist() for a in batch.label], batch.pad, index, batch.bucket_key)


def remaining_batches(it: mx.io.DataIter, most: int | None = None) -> Seen:
    """Return the contents of the next ``most`` batches, or of all batches until the end of the epoch."""
    batches: Seen = []
    while most is None or len(batches) < most:
        try:
            batches.append(contents(it.next()))
        except StopIteration:
            break
    return batches


@pytest.fixture(params=ITERATORS, ids=lambda name: name.replace(" ", "_"))
def make(request, tmp_path):
    """Return a function that creates equal iterators; those that can be closed are closed after the test."""
    with contextlib.ExitStack() as result:

        def fresh() -> mx.io.DataIter:
            it = ITERATORS[request.param](tmp_path)
            if hasattr(it, "close"):
                result.callback(it.close)
            return it

        yield fresh


def test_an_epoch(make):
    """Batches have the declared shapes and dtypes, and after an epoch no batch comes until ``reset()``."""
    mx.random.seed(1)
    it = make()
    for _ in range(3):
        count = 0
        for batch in it:
            count += 1
            for descs, actual in (
                (batch.provide_data or it.provide_data, batch.data),
                (batch.provide_label or it.provide_label, batch.label),
            ):
                assert [(d.shape, d.dtype) for d in descs] == [(a.shape, a.dtype) for a in actual]
            assert 0 <= batch.pad < it.batch_size
        assert count
        assert remaining_batches(it) == []
        it.reset()


def test_the_seed_decides(make):
    """Equal iterators with equal seeds give equal epochs."""
    runs = []
    for _ in range(2):
        mx.random.seed(5)
        it = make()
        epochs = [remaining_batches(it)]
        it.reset()
        runs.append([*epochs, remaining_batches(it)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("epoch", [0, 1])
def test_another_iterator_continues(make, epoch):
    """A new iterator with the state of another continues with its remaining batches and its next epoch.

    This is true at every position of an epoch. A state survives JSON; reading or setting it draws no random number.
    """
    mx.random.seed(7)
    it = make()
    for _ in range(epoch):
        remaining_batches(it)
        it.reset()
    states, batches = [it.state()], []
    while actual := remaining_batches(it, 1):
        batches += actual
        states.append(it.state())
    mx.random.seed(8)
    it.reset()
    following = remaining_batches(it)
    for place, state in enumerate(states):
        mx.random.seed(99)
        resumed = make()
        remaining_batches(resumed, place % 2)
        key = mx.random.next_key(mx.cpu())
        resumed.set_state(json.loads(json.dumps(state)))
        assert mx.random.next_key(mx.cpu()) == (key[0], key[1] + 1)
        assert resumed.state() == state
        assert remaining_batches(resumed) == batches[place:]
        mx.random.seed(8)
        resumed.reset()
        assert remaining_batches(resumed) == following


def test_foreign_states_are_refused(make):
    """A state of another class, with other settings or without content raises ParameterError.

    The iterator keeps its position.
    """
    mx.random.seed(3)
    it, twin = make(), None
    mx.random.seed(3)
    twin = make()
    assert remaining_batches(it, 1) == remaining_batches(twin, 1)
    own = it.state()

    def changed(value: Any) -> Any:
        """Return the state with one setting changed, in this iterator or in one that it contains."""
        if value.get("of"):
            name = next(iter(value["of"]))
            return {**value, "of": {**value["of"], name: [value["of"][name], 17]}}
        (inner,) = [name for name in value if name not in ("iterator", "of")]
        held = value[inner]
        if isinstance(held, dict):
            return {**value, inner: changed(held)}
        return {**value, inner: [*held[:-1], {**held[-1], "source": changed(held[-1]["source"])}]}

    for bad in (
        None,
        {},
        [],
        {**own, "iterator": "Other"},
        changed(own),
        {"iterator": own["iterator"], "of": own["of"]},
    ):
        with pytest.raises(ParameterError, match="set_state"):
            it.set_state(bad)
        assert it.state() == own
    assert remaining_batches(it) == remaining_batches(twin)


def test_differences_are_listed():
    """``set_state`` raises ParameterError with both values of every differing setting, and for invalid values."""
    state = arrays(shuffle=True).state()
    with pytest.raises(
        ParameterError, match=r"shuffle: True then, False now; last_batch_handle: 'pad' then, 'discard'"
    ):
        arrays(last_batch_handle="discard").set_state(state)
    for wrong in ({"cursor": 99}, {"cursor": -1}, {"cursor": 1.0}, {"key": [1]}, {"carried": [11]}, {"brought": None}):
        with pytest.raises(ParameterError, match=r"NDArrayIter\.set_state"):
            arrays(shuffle=True).set_state({**state, **wrong})


class Plain(mx.io.DataIter):
    """A user's iterator without states, whose third batch raises ValueError."""

    def __init__(self) -> None:
        super().__init__(1)
        self.provide_data, self.provide_label = [("data", (1,))], []
        self.reset()

    def reset(self) -> None:
        self.at = 0

    def next(self) -> mx.io.DataBatch:
        self.at += 1
        if self.at == 3:
            raise ValueError("the third cannot be read")
        if self.at > 5:
            raise StopIteration
        return mx.io.DataBatch([mx.nd.full((1,), self.at)])


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_user_iterator(depth):
    """An iterator without states raises NotResumableError; if a batch raises, the later batches still follow."""
    plain = Plain()
    it = mx.io.PrefetchingIter(plain, depth=depth) if depth else plain
    for use in (it.state, lambda: it.set_state({}) if depth == 0 else it.state()):
        with pytest.raises(NotResumableError, match="Plain cannot be resumed"):
            use()
    for _ in range(2):
        assert [float(it.next().data[0].asscalar()) for _ in range(2)] == [1, 2]
        with pytest.raises(ValueError, match="third"):
            it.next()
        assert [float(it.next().data[0].asscalar()) for _ in range(2)] == [4, 5]
        for _ in range(2):
            with pytest.raises(StopIteration):
                it.next()
        it.reset()
    if depth:
        it.close()
    assert issubclass(NotResumableError, MXNetError)
