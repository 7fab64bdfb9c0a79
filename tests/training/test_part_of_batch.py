"""PartOfBatchIter: the parts of all workers together are the batch, with its padding."""

from __future__ import annotations

import numpy as np
import pytest

import weftplan as mx
from weftplan.data.worker_share import PartOfBatchIter
from weftplan.errors import ParameterError


def source(shuffle: bool = False) -> mx.io.NDArrayIter:
    """Return an iterator over ten samples in batches of four; the last batch has two padded rows."""
    return mx.io.NDArrayIter(np.arange(20.0).reshape(10, 2), np.arange(10.0), batch_size=4, shuffle=shuffle)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_parts_are_the_batch(workers: int):
    """The concatenated parts have the data, labels, padding and indices of the whole batch in two epochs."""
    mx.random.seed(5)
    whole = source(shuffle=True)
    epochs = [[*whole], whole.reset() or [*whole]]
    parts = []
    for rank in range(workers):
        mx.random.seed(5)
        part = PartOfBatchIter(source(shuffle=True), rank=rank, num_workers=workers)
        parts.append([[*part], part.reset() or [*part]])
        assert part.provide_data[0].shape == (4 // workers, 2)
        assert part.provide_label[0].shape == (4 // workers,)
    for epoch, batches in enumerate(epochs):
        for number, batch in enumerate(batches):
            cut = [parts[rank][epoch][number] for rank in range(workers)]
            assert np.concatenate([one.data[0].asnumpy() for one in cut]).tolist() == batch.data[0].tolist()
            assert np.concatenate([one.label[0].asnumpy() for one in cut]).tolist() == batch.label[0].tolist()
            assert sum(one.pad for one in cut) == batch.pad
            assert np.concatenate([one.index for one in cut]).tolist() == batch.index.tolist()


def test_what_cannot_be_shared():
    """A batch size that the number of workers does not divide, and a rank out of range, raise."""
    with pytest.raises(ParameterError, match="batches of 4 cannot be shared evenly by 3"):
        PartOfBatchIter(source(), rank=0, num_workers=3)
    with pytest.raises(ParameterError, match=r"rank must be in \[0, 2\), got 2"):
        PartOfBatchIter(source(), rank=2, num_workers=2)
