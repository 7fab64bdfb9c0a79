"""The tasks of ``weftplan train``: a module, its data, and a measure of its quality.

Each task creates its data from a seed. The module is stateless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weftplan import models, rnn
from weftplan import symbol as sym
from weftplan.data.data_iter import DataIter
from weftplan.data.datasets import Lines, load_digits, load_help_text
from weftplan.data.ndarray_iter import NDArrayIter
from weftplan.data.worker_share import PartOfBatchIter
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray
from weftplan.symbol import Symbol
from weftplan.training.metrics.metric import Perplexity
from weftplan.training.module.base_module import BaseModule
from weftplan.training.module.bucketing_module import BucketingModule
from weftplan.training.module.module import Module

DIGITS = ("mlp", "lenet", "resnet")
NETWORKS = (*DIGITS, "lstm")
BUCKETS = (16, 32, 48, 64, 80)
"""Lengths to which lines of text are padded."""
HIDDEN = 128


@dataclass
class TrainingTask:
    """A training task."""

    module: BaseModule
    train: DataIter
    test: DataIter
    batches: int
    """Batches of an epoch."""
    metric: Any
    epochs: int
    """Default number of epochs."""
    optimizer: str
    optimizer_params: dict[str, Any]
    described: str
    unit: str
    """The plural name of a sample."""
    prefix: str
    """Prefix of a checkpoint after Ctrl-C, unless the user names one."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Figures of the data for the result."""
    values: tuple[dict[str, NDArray], dict[str, NDArray]] | None = None
    """Values of parameters and auxiliary states to start from."""
    usage: str = ""
    """Options of ``weftplan run`` for inputs like those of training."""

    def score(self) -> dict[str, float]:
        """Return the quality of the trained module on the test data, by name of the measure."""
        values = dict(self.module.score(self.test, self.metric))
        if "perplexity" not in values:
            return {"test_accuracy": values["accuracy"]}
        bits = math.log2(values["perplexity"])
        return {"test_perplexity": values["perplexity"], "test_bits_per_character": bits}


def digits(
    network: str, batch_size: int, *, seed: int, rank: int, workers: int, lr: float | None, settings: dict[str, Any]
) -> TrainingTask:
    """Return the task of a network on the handwritten digits; several processes share each batch.

    Raises:
        ParameterError: a batch has no images, or more than the training data.
    """
    split = load_digits(seed=seed)
    if not 1 <= batch_size <= len(split.train_labels):  # the iterator would only be empty
        raise ParameterError(
            f"batch_size must be an integer in [1, {len(split.train_labels)}], the number of training images, "
            f"got {batch_size}"
        )
    train: DataIter = NDArrayIter(
        split.train_images, split.train_labels, batch_size, shuffle=True, last_batch_handle="discard"
    )
    if workers > 1:
        train = PartOfBatchIter(train, rank=rank, num_workers=workers)
    test = NDArrayIter(split.test_images, split.test_labels, min(batch_size // workers, len(split.test_labels)))
    return TrainingTask(
        module=Module(models.digits(network), **settings),
        train=train,
        test=test,
        batches=len(split.train_labels) // batch_size,
        metric=["acc", "ce"],
        epochs=25,
        optimizer="sgd",
        optimizer_params={"learning_rate": 0.05 if lr is None else lr, "momentum": 0.9, "wd": 1e-4},
        described=f"{len(split.train_labels):,} training and {len(split.test_labels):,} test images",
        unit="images",
        prefix=f"digits-{network}",
    )


def characters(
    batch_size: int,
    *,
    seed: int,
    workers: int,
    lr: float | None,
    settings: dict[str, Any],
) -> TrainingTask:
    """Return the task of an LSTM that predicts the next character of a line of Python's help, in length buckets.

    Raises:
        ParameterError: several processes.
    """
    if workers > 1:
        raise ParameterError("--network lstm trains in one process: its buckets are not shared between several")
    text = load_help_text(seed=seed)
    train = rnn.BucketSentenceIter(text.train, batch_size, buckets=list(BUCKETS), invalid_label=0)
    fullest = max(np.bincount(np.searchsorted(BUCKETS, [len(line) for line in text.test])))
    test = rnn.BucketSentenceIter(text.test, min(batch_size, int(fullest)), buckets=list(BUCKETS), invalid_label=0)
    classes = len(text.characters) + 1  # 0 is the padding

    def generate(length: int) -> tuple[Symbol, Sequence[str], Sequence[str]]:
        return character_network(length, classes, HIDDEN), ("data",), ("softmax_label",)

    return TrainingTask(
        module=BucketingModule(generate, train.default_bucket_key, **settings),
        train=train,
        test=test,
        batches=len(train.idx),
        metric=Perplexity(0),
        epochs=8,
        optimizer="adam",
        optimizer_params={"learning_rate": 0.005 if lr is None else lr, "clip_gradient": 5.0},
        described=f"{len(text.train):,} training and {len(text.test):,} test lines of Python's help, "
        f"{len(text.characters)} characters",
        unit="lines",
        prefix="text-lstm",
        facts={"characters": len(text.characters), "unigram_bits_per_character": frequency_bits(text)},
    )


def character_network(length: int, classes: int, hidden: int) -> Symbol:
    """Build an embedding, one LSTM operator over ``length`` steps, and a softmax over the characters at every step."""
    cell = rnn.FusedRNNCell(hidden, prefix="lstm_")
    embedded = sym.Embedding(sym.Variable("data"), input_dim=classes, output_dim=32, name="embed")
    steps = sym.SwapAxis(embedded, dim1=0, dim2=1)
    outputs: Any = cell.unroll(length, steps, layout="TNC", merge_outputs=True)[0]
    # Samples first again, so that each device's rows belong to its samples.
    rows = sym.Reshape(sym.SwapAxis(outputs, dim1=0, dim2=1), shape=(-1, hidden))
    scores = sym.FullyConnected(rows, num_hidden=classes, name="pred")
    label = sym.Reshape(sym.Variable("softmax_label"), shape=(-1,))
    result: Symbol = sym.SoftmaxOutput(scores, label, use_ignore=True, ignore_label=0, name="softmax")
    return result


def frequency_bits(text: Lines) -> float:
    """Return bits per character of a predictor that knows only character frequencies, the baseline of a network."""
    counts = np.bincount([n for line in text.train for n in line], minlength=len(text.characters) + 1) + 1.0
    share = counts / counts.sum()
    # The first character of a line is not predicted.
    return float(-np.mean([np.log2(share[n]) for line in text.test for n in line[1:]]))


def make(
    network: str, batch_size: int, *, seed: int, rank: int, workers: int, lr: float | None, settings: dict[str, Any]
) -> TrainingTask:
    """Return the task of a name; ``settings`` are keywords of its module."""
    if network in DIGITS:
        return digits(network, batch_size, seed=seed, rank=rank, workers=workers, lr=lr, settings=settings)
    return characters(batch_size, seed=seed, workers=workers, lr=lr, settings=settings)
