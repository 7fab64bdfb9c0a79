"""Buckets of a push that are all there: one operation and, where all processes have it so, one exchange.

Buckets let the first gradients travel while others are computed. Where nothing is to be computed any more they only
cost: 1 MB in three of them took half as long again as in one. So a push whose arrays nobody uses begins as one
operation, and says so in its first message. Where another process has said something else, all make the exchanges one
by one (``messages.py``), and nobody tries again for some pushes: so all come to try at the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from weftplan.errors import KVStoreError, WorkerLostError
from weftplan.kvstore.distributed.arrays.exchange_cache import Arrays, Round
from weftplan.kvstore.distributed.arrays.piece_copies import Known
from weftplan.kvstore.distributed.base import OPERATION
from weftplan.kvstore.distributed.exchange.bucket_operation import JointPart
from weftplan.kvstore.distributed.exchange.call_cache import Call
from weftplan.kvstore.distributed.exchange.tickets import Ticket
from weftplan.kvstore.distributed.group.group import Group
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.group.messages import Apart
from weftplan.kvstore.distributed.transport.wire import Kind
from weftplan.kvstore.reduce import Array
from weftplan.ndarray import NDArray


class TogetherPart(JointPart):
    """The arrays of all buckets of a call; the other arguments are those of every part."""

    __slots__ = ("_call",)

    kind = Kind.TOGETHER

    def __init__(
        self,
        call: Call,
        round: Round,
        sources: Sequence[NDArray],
        add: Callable[..., None],
        rows: Sequence[Sequence[NDArray]],
    ) -> None:
        super().__init__(round, sources, add, rows)
        self._call = call

    def sum(
        self, group: Group, shares: Sequence[Array], totals: Sequence[Array], what: str, failure: str | None
    ) -> Iterable[None]:
        steps = super().sum(group, shares, totals, what, failure)
        if steps == ():
            self._call.together = True
        return steps

    def _sum(
        self,
        group: Group,
        shares: Sequence[Array],
        totals: Sequence[Array],
        what: str,
        failure: str | None,
        begun: Known | None,
    ) -> Steps[None]:
        if failure is None:
            try:
                yield from super()._sum(group, shares, totals, what, failure, begun)
            except Apart:
                self._call.together = False
                group.settle()
            else:
                self._call.together = True
                return
        yield from self._one_by_one(group, shares, totals, failure)

    def _one_by_one(
        self, group: Group, shares: Sequence[Array], totals: Sequence[Array], failure: str | None
    ) -> Steps[None]:
        """Exchange bucket after bucket: all of them even where one fails, since the others do so; then all have."""
        error: KVStoreError | None = None
        made, end = [], 0
        for bucket in self._call.buckets:
            some = slice(end, end + len(bucket.keys))
            end, rows = some.stop, [row[some] for row in self.also]
            try:
                yield from group.sum(shares[some], totals[some], bucket.description, failure, rows)
                made.append((some, len(rows)))
            except WorkerLostError:
                raise
            except KVStoreError as raised:
                error = error or raised
        for some, known in made:
            for row in self.also[known:]:  # those that a pull has added meanwhile
                for total, copy in zip(totals[some], row[some], strict=True):
                    copy[...] = total
        if error is not None:
            raise error


def begun_together(call: Call, pushed: Arrays, pulled: Arrays | None, add: Callable[..., None]) -> Ticket | None:
    """The exchange of all buckets of a call, whose operation has begun; None where this push is not to try it, or where
    somebody uses the arrays.

    Args:
        pushed, pulled: arrays, and what is known of them; what is pulled may be ``pushed``.
        add: as of every part.
    """
    whole = call.tries()
    if whole is None:
        return None
    given, arrays = pushed
    rows: Sequence[Sequence[NDArray]] = ()
    (round,) = call.rounds(given, arrays, updates=None)
    if pulled is not None:
        rows = (whole.of(pulled[1]),)
        round = round.wider(pulled[0], rows[0])
    part = TogetherPart(call, round, whole.of(arrays), add, rows)
    if not part.begin(OPERATION):
        call.together = False
        return None
    call.pushed, whole.part = (whole,), part
    return Ticket(whole.description, (part,), part.sum)
