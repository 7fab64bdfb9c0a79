"""The calls that ``fit``, ``score`` and ``predict`` make to an iterator, and the seed that decides its order.

The expected calls are those of MXNet 1.9.1. So an iterator that shuffles in ``reset`` gives the same order as under
MXNet after the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from weftplan.data.image_files import encode


class Recording(mx.io.DataIter):
    """An iterator over batches of zeros; ``calls`` has an R for each ``reset`` and an n for each ``next``."""

    def __init__(self, count: int = 2) -> None:
        super().__init__(4)
        self.count, self.given, self.calls = count, 0, ""
        self.provide_data = [mx.io.DataDesc("data", (4, 3))]
        self.provide_label = [mx.io.DataDesc("softmax_label", (4,))]
        self.reset()

    def reset(self) -> None:
        self.given, self.calls = 0, self.calls + "R"

    def next(self) -> mx.io.DataBatch:
        self.calls += "n"
        if self.given == self.count:
            raise StopIteration
        self.given += 1
        return mx.io.DataBatch([mx.nd.zeros((4, 3))], [mx.nd.zeros((4,))], pad=0)


def network() -> mx.sym.Symbol:
    """Return a classifier of one layer."""
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2), name="softmax")


def fit(data: mx.io.DataIter, validation: mx.io.DataIter | None = None, epochs: int = 2) -> mx.mod.Module:
    """Train a module on ``data`` and return it."""
    module = mx.mod.Module(network())
    module.fit(data, validation, num_epoch=epochs)
    return module


def fit_after_next(data: Recording) -> None:
    """Take a batch from ``data``, then fit with it."""
    data.next()
    fit(data)


def score_and_predict(data: Recording) -> None:
    """Run ``score``, then ``predict``, of a module."""
    module = mx.mod.Module(network())
    module.bind(data.provide_data, data.provide_label)
    module.init_params()
    module.score(data, "acc")
    module.predict(data)


def fit_feed_forward(data: Recording, size: int | None = None) -> mx.model.FeedForward:
    """Train a FeedForward and return it; ``size`` sets epoch_size, with three epochs instead of two."""
    model = mx.model.FeedForward(network(), num_epoch=2 if size is None else 3, epoch_size=size)
    model.fit(data)
    return model


def score_feed_forward(data: Recording) -> None:
    """Train a FeedForward, then score and predict with it."""
    model = fit_feed_forward(data)
    model.score(data)
    model.predict(data)


CASES: dict[str, tuple[int, Callable[[Recording], object], str]] = {
    "fit": (2, fit, "RnnnRnnnR"),
    "validation": (2, lambda data: fit(Recording(), data), "RRnnnRnnn"),
    "used": (2, fit_after_next, "RnnnRnnnR"),
    "score and predict": (2, score_and_predict, "RRnnnRnnn"),
    "FeedForward": (2, fit_feed_forward, "RRnnnRnnnR"),
    "FeedForward, score and predict": (2, score_feed_forward, "RRnnnRnnnRRnnnRnnn"),
    "FeedForward, size": (3, lambda data: fit_feed_forward(data, 2), "RRnnnnRnnn"),
    "ResizeIter": (2, lambda data: fit(mx.io.ResizeIter(data, 3)), "RnnnRnRnnnRnR"),
    "ResizeIter, kept": (2, lambda data: fit(mx.io.ResizeIter(data, 3, reset_internal=False)), "RnnnRnnnRnn"),
}


@pytest.mark.filterwarnings("ignore:FeedForward is deprecated")
@pytest.mark.parametrize("case", CASES)
def test_calls_of_an_iterator(case: str):
    """The iterator gets the same calls as from MXNet, in the same order, including the constructor's reset."""
    count, use, calls = CASES[case]
    data = Recording(count)
    use(data)
    assert data.calls == calls


def test_a_second_fit():
    """A second ``fit`` does not reset the iterator at its start, because the first ended with a reset."""
    data = Recording()
    module = fit(data)
    data.calls = ""
    module.fit(data, num_epoch=1)
    assert data.calls == "nnnR"


def test_an_exhausted_iterator_starts_over():
    """``fit`` resets an exhausted iterator once, unlike MXNet, which raises; without batches it raises."""
    data = Recording()
    assert len(list(data)) == 2
    data.calls = ""
    fit(data, epochs=1)
    assert data.calls == "nRnnnR"
    with pytest.raises(mx.MXNetError, match="train_data gave no batch in epoch 0"):
        fit(Recording(0))


def test_seeds_of_a_shuffling_iterator():
    """If ``reset`` shuffles with a seeded generator, epoch ``n`` has the order of reset ``n``."""

    class Shuffling(Recording):
        def __init__(self) -> None:
            self.rng, self.orders = np.random.default_rng(3), []
            super().__init__()

        def reset(self) -> None:
            super().reset()
            self.orders.append(self.rng.permutation(5).tolist())

    data = Shuffling()
    used = []
    module = mx.mod.Module(network())
    module.fit(data, num_epoch=2, epoch_end_callback=lambda *_: used.append(data.orders[-1]))
    rng = np.random.default_rng(3)
    assert used == [rng.permutation(5).tolist() for _ in range(2)]


def images(folder: Path) -> mx.image.ImageIter:
    """Return a shuffling iterator over 20 grey images of different shades."""
    pytest.importorskip("PIL")
    for shade in range(20):
        (folder / f"{shade}.png").write_bytes(encode(np.full((4, 4), 10 * shade, np.uint8), 3, ".png"))
    listed = [[float(shade), f"{shade}.png"] for shade in range(20)]
    return mx.image.ImageIter(4, (3, 4, 4), imglist=listed, path_root=str(folder), shuffle=True)


SHUFFLING: dict[str, Callable[[Path], mx.io.DataIter]] = {
    "NDArrayIter": lambda folder: mx.io.NDArrayIter(np.arange(40.0), None, 4, shuffle=True),
    "BucketSentenceIter": lambda folder: mx.rnn.BucketSentenceIter([[k, k] for k in range(40)], 4),
    "ImageIter": images,
}


@pytest.mark.parametrize("case", SHUFFLING)
def test_the_seed_of_an_order(case: str, tmp_path: Path):
    """In a program that called np.random.seed, this seed alone decides the order; otherwise mx.random.seed does."""

    def orders(seed: Callable[[int], object], number: int) -> list[list[float]]:
        seed(number)
        data = SHUFFLING[case](tmp_path)
        seen = []
        for _ in range(3):
            seen.append(np.concatenate([batch.data[0].asnumpy().ravel() for batch in data]).tolist())
            data.reset()
        return seen

    first = orders(mx.random.seed, 1)
    assert first != orders(mx.random.seed, 2)
    assert first == orders(mx.random.seed, 1)
    seeded = orders(np.random.seed, 1)
    mx.random.uniform(shape=(3,))
    assert orders(np.random.seed, 1) == seeded
    assert orders(np.random.seed, 2) != seeded
    assert len({str(order) for order in seeded}) == 3


def test_a_run_goes_on_with_orders_of_numpy(tmp_path: Path):
    """In a program that seeds NumPy, a stopped and resumed run gives the bits of an uninterrupted run."""

    def run(prefix: str | None, stop: int | None = None, *, resume: bool = False) -> bytes | None:
        mx.random.seed(0)
        np.random.seed(5)  # noqa: NPY002 - as scripts for MXNet do
        rng = np.random.default_rng(0)
        data = mx.io.NDArrayIter(rng.random((20, 3), np.float32), rng.integers(0, 2, 20), 4, shuffle=True)
        module, steps = mx.mod.Module(network()), iter(range(100))

        def callback(param: object) -> None:
            if next(steps) == stop:
                raise KeyboardInterrupt

        settings = {} if prefix is None else {"checkpoint": prefix, "every": 2, "resume": resume}
        try:
            module.fit(data, num_epoch=4, batch_end_callback=callback, initializer=mx.init.Xavier(), **settings)
        except KeyboardInterrupt:
            return None
        weight: bytes = module.get_params()[0]["fullyconnected0_weight"].asnumpy().tobytes()
        return weight

    with mx.name.NameManager():
        whole = run(None)
    for stop in (2, 8, 14):
        prefix = str(tmp_path / f"stopped{stop}")
        with mx.name.NameManager():
            assert run(prefix, stop) is None
        with mx.name.NameManager():
            assert run(prefix, resume=True) == whole
