"""What ``weftplan train`` trains: a module, its data, and how to say how good it is.

Each task makes its data from a seed. Nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weftplan import models, rnn
from weftplan import symbol as sym
from weftplan.device.context import Context
from weftplan.errors import ParameterError
from weftplan.symbol import Symbol
from weftplan.training.data.datasets import Lines, load_digits, load_help_text
from weftplan.training.data.ndarray_iter import DataIter, NDArrayIter
from weftplan.training.data.worker_share import PartOfBatchIter
from weftplan.training.metrics.metric import Perplexity
from weftplan.training.module.base_module import BaseModule
from weftplan.training.module.bucketing_module import BucketingModule
from weftplan.training.module.module import Module

DIGITS = ("mlp", "lenet", "resnet")
NETWORKS = (*DIGITS, "lstm")
BUCKETS = (16, 32, 48, 64, 80)
"""Lengths to which lines of text are filled up."""
HIDDEN = 128


@dataclass
class Task:
    """Something to train."""

    module: BaseModule
    train: DataIter
    test: DataIter
    batches: int
    """Of an epoch."""
    metric: Any
    epochs: int
    """How many it takes, unless somebody says otherwise."""
    optimizer: str
    optimizer_params: dict[str, Any]
    described: str
    unit: str
    """What a sample is, in the plural."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Figures of the data that go into the result."""

    def score(self) -> dict[str, float]:
        """How good the trained module is on the data for testing, by name."""
        found = dict(self.module.score(self.test, self.metric))
        if "perplexity" not in found:
            return {"test_accuracy": found["accuracy"]}
        bits = math.log2(found["perplexity"])
        return {"test_perplexity": found["perplexity"], "test_bits_per_character": bits}


def digits(
    network: str, batch_size: int, *, seed: int, rank: int, workers: int, lr: float | None, settings: dict[str, Any]
) -> Task:
    """A network on the handwritten digits; several processes share each batch."""
    split = load_digits(seed=seed)
    train: DataIter = NDArrayIter(
        split.train_images, split.train_labels, batch_size, shuffle=True, last_batch_handle="discard"
    )
    if workers > 1:
        train = PartOfBatchIter(train, rank=rank, num_workers=workers)
    test = NDArrayIter(split.test_images, split.test_labels, min(batch_size // workers, len(split.test_labels)))
    return Task(
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
    )


def characters(
    batch_size: int,
    *,
    seed: int,
    workers: int,
    lr: float | None,
    settings: dict[str, Any],
) -> Task:
    """An LSTM that says which character comes next in a line of Python's help, in buckets of line lengths.

    Raises:
        ParameterError: several processes.
    """
    if workers > 1:
        raise ParameterError("--network lstm trains in one process: its buckets are not shared between several")
    text = load_help_text(seed=seed)
    train = rnn.BucketSentenceIter(text.train, batch_size, buckets=list(BUCKETS), invalid_label=0)
    fullest = max(np.bincount(np.searchsorted(BUCKETS, [len(line) for line in text.test])))
    test = rnn.BucketSentenceIter(text.test, min(batch_size, int(fullest)), buckets=list(BUCKETS), invalid_label=0)
    classes = len(text.characters) + 1  # 0 fills up

    def generate(length: int) -> tuple[Symbol, Sequence[str], Sequence[str]]:
        return character_network(length, classes, HIDDEN), ("data",), ("softmax_label",)

    return Task(
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
        facts={"characters": len(text.characters), "unigram_bits_per_character": frequency_bits(text)},
    )


def character_network(length: int, classes: int, hidden: int) -> Symbol:
    """Embedding, one LSTM over ``length`` steps in one operator, and a softmax over the characters at every step."""
    cell = rnn.FusedRNNCell(hidden, prefix="lstm_")
    embedded = sym.Embedding(sym.Variable("data"), input_dim=classes, output_dim=32, name="embed")
    steps = sym.SwapAxis(embedded, dim1=0, dim2=1)
    outputs: Any = cell.unroll(length, steps, layout="TNC", merge_outputs=True)[0]
    # Samples first again, so that each device's rows are those of its samples.
    rows = sym.Reshape(sym.SwapAxis(outputs, dim1=0, dim2=1), shape=(-1, hidden))
    scores = sym.FullyConnected(rows, num_hidden=classes, name="pred")
    label = sym.Reshape(sym.Variable("softmax_label"), shape=(-1,))
    result: Symbol = sym.SoftmaxOutput(scores, label, use_ignore=True, ignore_label=0, name="softmax")
    return result


def frequency_bits(text: Lines) -> float:
    """Bits a character that knowing the characters' frequencies alone would need: what a network has to beat."""
    counts = np.bincount([n for line in text.train for n in line], minlength=len(text.characters) + 1) + 1.0
    share = counts / counts.sum()
    # The first character of a line is not predicted.
    return float(-np.mean([np.log2(share[n]) for line in text.test for n in line[1:]]))


def make(
    network: str,
    devices: Sequence[Context],
    batch_size: int,
    *,
    seed: int,
    rank: int,
    workers: int,
    lr: float | None,
    budget: str | None,
) -> Task:
    """The task of a name."""
    settings: dict[str, Any] = {"context": list(devices), "memory_budget": budget}
    if network in DIGITS:
        return digits(network, batch_size, seed=seed, rank=rank, workers=workers, lr=lr, settings=settings)
    return characters(batch_size, seed=seed, workers=workers, lr=lr, settings=settings)
