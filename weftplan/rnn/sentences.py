"""Sentences as numbers, batched by length: ``mx.rnn.BucketSentenceIter``.

The order of an epoch comes from ``mx.random``, so it depends on its seed and on the order of calls. Only one thread may
use an iterator.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weftplan.data.batch import DataBatch, DataDesc
from weftplan.data.data_iter import DataIter
from weftplan.data.random_draws import generator, order_key
from weftplan.data.resumable_position import State, checked_integer, key_in, make_state, read_state
from weftplan.errors import ParameterError
from weftplan.ndarray import array
from weftplan.support.array_types import DTypeLike

Sentences = Iterable[Sequence[Hashable]]


def encode_sentences(
    sentences: Sentences,
    vocab: dict[Hashable, int] | None = None,
    invalid_label: int = -1,
    invalid_key: Hashable = "\n",
    start_label: int = 0,
    unknown_token: Hashable = None,
) -> tuple[list[list[int]], dict[Hashable, int]]:
    """Return (sentences as lists of numbers, numbers of the words).

    Args:
        vocab: numbers of known words; None: start empty and give each new word the next number.
        invalid_label, invalid_key: number and word of padding.
        start_label: the first number.
        unknown_token: the word for all words outside ``vocab``; it gets a number on first use.

    Raises:
        ParameterError: a word that is not in ``vocab``, and no ``unknown_token``.

    >>> encode_sentences([["a", "b"], ["b", "c"]], start_label=1)
    ([[1, 2], [2, 3]], {'\\n': -1, 'a': 1, 'b': 2, 'c': 3})
    """
    vocabulary = {invalid_key: invalid_label} if vocab is None else vocab
    following = start_label
    coded = []
    for sentence in sentences:
        numbers = []
        for word in sentence:
            if word not in vocabulary:
                if vocab is not None and unknown_token is None:
                    raise ParameterError(f"encode_sentences: {word!r} is not in vocab, and there is no unknown_token")
                word = word if unknown_token is None else unknown_token
                if word not in vocabulary:
                    following += following == invalid_label
                    vocabulary[word] = following
                    following += 1
            numbers.append(vocabulary[word])
        coded.append(numbers)
    return coded, vocabulary


class BucketSentenceIter(DataIter):
    """Batches of sentences, padded to the length of their bucket; labels are the following words.

    Args:
        sentences: lists of numbers.
        buckets: lengths; default: each length with enough sentences for a batch. Longer sentences are dropped.
        invalid_label: the padding.
        dtype: of data and labels.
        layout: ``NT``: sentences along the first axis; ``TN``: along the second.

    Each epoch shuffles the batches, and the sentences within their bucket. The seed of ``np.random`` decides the
    order if the program has set it, else the seed of ``mx.random``.
    """

    def __init__(
        self,
        sentences: Sequence[Sequence[int]],
        batch_size: int,
        buckets: Sequence[int] | None = None,
        invalid_label: int = -1,
        data_name: str = "data",
        label_name: str = "softmax_label",
        dtype: DTypeLike = "float32",
        layout: str = "NT",
    ) -> None:
        super().__init__(batch_size)
        if layout not in ("NT", "TN"):
            raise ParameterError(f"BucketSentenceIter: layout must be 'NT' or 'TN', got {layout!r}")
        counts = np.bincount([len(sentence) for sentence in sentences])
        lengths = sorted(buckets or [n for n, count in enumerate(counts) if count >= batch_size and n])
        if not lengths:
            raise ParameterError(f"BucketSentenceIter: no length has a batch of {batch_size} sentences; give buckets")
        rows: dict[int, list[Any]] = {length: [] for length in lengths}
        self.discarded = 0
        for sentence in sentences:
            bucket = bisect_left(lengths, len(sentence))
            if bucket == len(lengths):
                self.discarded += 1
                continue
            row = np.full(lengths[bucket], invalid_label, dtype)
            row[: len(sentence)] = sentence
            rows[lengths[bucket]].append(row)
        self.data = [np.asarray(bucket_rows, dtype) for bucket_rows in rows.values() if bucket_rows]
        self.buckets = [length for length, bucket_rows in rows.items() if bucket_rows]
        self.invalid_label = invalid_label
        self.data_name, self.label_name = data_name, label_name
        self.dtype, self.layout = np.dtype(dtype), layout
        self.default_bucket_key = max(self.buckets)
        self.provide_data = [self._desc(data_name, self.default_bucket_key)]
        self.provide_label = [self._desc(label_name, self.default_bucket_key)]
        self.idx: list[tuple[int, int]] = []
        self._facts = {"batch_size": batch_size, "rows": [list(rows.shape) for rows in self.data]}
        self.reset()

    def _desc(self, name: str, length: int) -> DataDesc:
        shape = (self.batch_size, length) if self.layout == "NT" else (length, self.batch_size)
        return DataDesc(name, shape, self.dtype, self.layout)

    def reset(self) -> None:
        self._begin(order_key())

    def _begin(self, key: tuple[int, int]) -> None:
        chance = generator(key)
        self._key, self.curr_idx = key, 0
        self._orders = [np.arange(len(rows)) for rows in self.data]
        for order in self._orders:
            chance.shuffle(order)
        self.idx = [
            (bucket, start)
            for bucket, rows in enumerate(self.data)
            for start in range(0, len(rows) - self.batch_size + 1, self.batch_size)
        ]
        chance.shuffle(self.idx)

    def state(self) -> State:
        return make_state(self, self._facts, key=list(self._key), batch=self.curr_idx)

    def set_state(self, state: Mapping[str, object]) -> None:
        key, batch = read_state(self, state, self._facts, "key", "batch")
        drawn, batch_index = key_in(self, key), checked_integer(self, "batch", batch, len(self.idx))
        self._begin(drawn)
        self.curr_idx = batch_index

    def next(self) -> DataBatch:
        if self.curr_idx == len(self.idx):
            raise StopIteration
        bucket, start = self.idx[self.curr_idx]
        rows = self.data[bucket][self._orders[bucket][start : start + self.batch_size]]
        labels = np.full_like(rows, self.invalid_label)
        labels[:, :-1] = rows[:, 1:]
        length = self.buckets[bucket]
        arrays = [part if self.layout == "NT" else np.ascontiguousarray(part.T) for part in (rows, labels)]
        batch = DataBatch(
            [array(arrays[0], dtype=self.dtype)],
            [array(arrays[1], dtype=self.dtype)],
            bucket_key=length,
            provide_data=[self._desc(self.data_name, length)],
            provide_label=[self._desc(self.label_name, length)],
        )
        self.curr_idx += 1  # last: a batch that cannot be made is not lost
        return batch
