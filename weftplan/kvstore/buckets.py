"""Order of gradients in an exchange, and their division into buckets.

Two flags limit a bucket, as documented by Paddle: FLAGS_fuse_parameter_groups_size its number of gradients, and
FLAGS_fuse_parameter_memory_size its size in MiB. A gradient above the size limit has its own bucket. All gradients of a
bucket have one dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from weftplan import config
from weftplan.errors import ConfigError
from weftplan.kvstore.keys import Key
from weftplan.support.array_types import DType

Item = TypeVar("Item")

SMALL = 16
"""Items before a large item are small if they have together at most 1 / ``SMALL`` of its bytes."""


@dataclass(frozen=True)
class BucketRule:
    """Limits of a bucket.

    Attributes:
        count: maximum number of gradients; -1 is no limit.
        nbytes: maximum number of bytes, except for a single larger gradient; None is no limit.
    """

    count: int
    nbytes: int | None

    @classmethod
    def from_environment(cls) -> BucketRule:
        """Return the rule that the two flags set.

        Raises:
            ConfigError: FLAGS_fuse_parameter_groups_size is 0.
        """
        count = int(config.get("FLAGS_fuse_parameter_groups_size"))
        if count == 0:
            raise ConfigError("FLAGS_fuse_parameter_groups_size=0: a group has at least one gradient; -1 is no limit")
        mebibytes = float(config.get("FLAGS_fuse_parameter_memory_size"))
        return cls(count, int(mebibytes * 2**20) if mebibytes >= 0 else None)

    def cut(self, items: Sequence[tuple[Item, int, DType]]) -> list[list[Item]]:
        """Divide items into buckets of consecutive items.

        If the byte limit ends a bucket before a large item, small items (:data:`SMALL`) at the bucket's end move to the
        next bucket, with the large item. They are usually the bias of the same layer, which becomes ready together with
        the weight; the earlier items of the bucket then need not wait for them.

        Args:
            items: (item, its bytes, its dtype) in the order of exchange.

        >>> import numpy as np
        >>> four = np.dtype("f4")
        >>> BucketRule(count=2, nbytes=100).cut([("a", 40, four), ("b", 40, four), ("c", 40, four), ("d", 80, four)])
        [['a', 'b'], ['c'], ['d']]
        >>> BucketRule(count=-1, nbytes=100).cut([("a", 90, four), ("bias", 2, four), ("weight", 90, four)])
        [['a'], ['bias', 'weight']]
        """
        groups: list[list[tuple[Item, int]]] = []
        filled, kind = 0, None
        for item, nbytes, dtype in items:
            is_full = not groups or dtype != kind or len(groups[-1]) == self.count
            if is_full or (self.nbytes is not None and filled + nbytes > self.nbytes):
                group: list[tuple[Item, int]] = []
                filled = 0
                if not is_full and self.nbytes is not None:
                    limit = min(nbytes // SMALL, self.nbytes - nbytes)
                    while len(groups[-1]) > 1 and filled + groups[-1][-1][1] <= limit:
                        group.insert(0, groups[-1].pop())
                        filled += group[0][1]
                groups.append(group)
            groups[-1].append((item, nbytes))
            filled += nbytes
            kind = dtype
        return [[item for item, _ in group] for group in groups]


def order_of_exchange(values: Mapping[Key, Item], ready: Sequence[Key] | None) -> list[Item]:
    """Return the values of a mapping in the order of keys ``ready``; None: the last key first, as backward does.

    >>> order_of_exchange({1: "a", 2: "b"}, None), order_of_exchange({1: "a", 2: "b"}, [1, 2])
    (['b', 'a'], ['a', 'b'])
    """
    return [*values.values()][::-1] if ready is None else [values[key] for key in ready]
