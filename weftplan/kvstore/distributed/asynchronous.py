"""``dist_async``: servers apply each push on arrival, and no worker waits for another.

Each process is a worker and, on a separate thread, the server of a part of the values (``server.py``). A push sums over
this process's devices and sends the sum to the servers of the value; a pull requests the value from them. Between a
worker's pull of a value and its push, other workers may push: the number of these pushes is the *staleness* reported by
:meth:`KVStoreDistAsync.statistics`. Results depend on the order of arrival, so runs differ; ``dist_sync`` gives
reproducible results.

A worker's pushes and pulls of one key take effect in program order. After the death of a process, the others get a
:class:`~weftplan.errors.WorkerLostError` at their next push or pull. The dead server's values are lost, so the job
cannot go on.
"""

from __future__ import annotations

import copy as copies
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from weftplan.device.context import cpu
from weftplan.engine import FnProperty, Var
from weftplan.engine import get as get_engine
from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.base import EXIT_S, FAILED_S, KVStoreDist
from weftplan.kvstore.distributed.exchange.sequencer import wait_driving
from weftplan.kvstore.distributed.exchange.tickets import Exchange, OnComplete, Ticket, TicketPart
from weftplan.kvstore.distributed.footprint import AsyncFootprint, JobPosition
from weftplan.kvstore.distributed.group.group import RankGroup
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.server import Header, Server, Verb, ask
from weftplan.kvstore.distributed.server_states import ServerStates
from weftplan.kvstore.distributed.transport import mpi
from weftplan.kvstore.distributed.transport.elastic_job import ElasticJob
from weftplan.kvstore.distributed.transport.mpi_types import JobRank
from weftplan.kvstore.fixed_order_sums import Array
from weftplan.kvstore.keys import Key
from weftplan.kvstore.layout import BucketLayout, Groups
from weftplan.kvstore.partition import placement
from weftplan.kvstore.stages import copy_to_all
from weftplan.kvstore.updater import OptimizerProtocol, Updater
from weftplan.kvstore.ways_of_summing import Item
from weftplan.ndarray import NDArray
from weftplan.support import program_end
from weftplan.support.rollback import rollback


class KVStoreDistAsync(AsyncFootprint, KVStoreDist):
    """A store whose values are on servers, one in each process; pushes need an optimizer."""

    def __init__(self, name: str = "dist_async") -> None:
        if ElasticJob.of_this_process() is not None:
            raise KVStoreError(
                "dist_async cannot replace a lost rank, whose share of the values is lost too: use dist_sync, or "
                "weftplan launch without --elastic"
            )
        super().__init__(name)
        self._mpi = mpi.start()
        self._comm = mpi.communicator(self._mpi)
        self._server = Server(self._mpi, self._comm)
        self._group.advice = "start again from a checkpoint"
        self._ranges: dict[Key, list[tuple[JobRank, int, int]]] = {}
        """(server, first element, end) of each range of a value, by key; fixed by ``init``."""
        self._versions: dict[Key, list[int]] = {}
        """The last version that this worker has received of each range of a value, by key."""
        self._optimizer: Any = None

    # -- data -----------------------------------------------------------------------------------------------------

    def init(self, key: object, value: object) -> None:
        """Create keys on their servers with the values of rank 0; every rank calls this and waits for the other ranks.

        Raises:
            KVStoreError: a key exists already, or keys or values are wrong or differ between ranks.
        """
        with self._turn, rollback(self), self._server.rollback():
            keys = [k for k, _ in self._new_values(key, value)]
            super().init(key, value)
            values = {k: self._stored[k].asnumpy().reshape(-1) for k in keys}
            members = list(self._group.members)  # as the exchanges of the values have left them, the same on all ranks
            for k, flat in values.items():
                ranges = placement(self._keys.number(k), flat.size, len(members), self._bound)
                self._ranges[k] = [(members[position], begin, end) for position, begin, end in ranges]
                for server, begin, end in self._ranges[k]:
                    if server == self._group.rank:
                        self._server.add(self._keys.number(k), k, flat[begin:end])
                self._versions[k] = [0] * len(ranges)
            self._meet("begin with these keys")

    def broadcast(self, key: object, value: object, out: object, priority: int = 0) -> None:
        """Do :meth:`init`, then :meth:`pull` into ``out``.

        Raises:
            KVStoreError: an argument is wrong for :meth:`init` or :meth:`pull`; no key is created then.
        """
        with self._server.rollback():
            super().broadcast(key, value, out, priority)

    def _lay(self, pushed: Groups, pulled: Groups, priority: int, ready: Sequence[Key] | None = None) -> BucketLayout:
        del priority, ready
        return BucketLayout(pushed, pulled, (), (), False, self._version)  # servers update each key by itself

    def _run(self, layout: BucketLayout, priority: int) -> None:
        self._sequencer.check()
        if self._optimizer is None:
            raise KVStoreError("dist_async needs an optimizer: call set_optimizer on every rank before push")
        rate = _rate(self._optimizer)
        requests = []  # every buffer and way of summing before the first request
        for key, arrays in layout.pushed:
            total = self._merge_buffer(key, arrays)
            sums = list(self._by_method([Item(key, arrays, total, total, ())], updates=False))
            requests.append((key, sums, total, (total.var,)))
        for key, sums, total, reads in requests:
            for batch in sums:
                self._launch(batch, (), priority)
            # The operation also writes the stored value's var, so that a later pull of this key waits for the push.
            self._ask(key, Verb.PUSH, total, reads, priority, rate)
        self._copy_out(layout.pulled, priority, separate=True)

    def _copy_out(self, pulled: Groups, priority: int, *, separate: bool) -> None:
        del separate
        self._sequencer.check()
        for key, arrays in pulled:
            stored = self._stored[key]
            self._ask(key, Verb.PULL, stored, (), priority, None)
            copy_to_all(stored, arrays, priority)

    def _ask(
        self, key: Key, verb: Verb, values: NDArray, reads: tuple[Var, ...], priority: int, rate: float | None
    ) -> None:
        """Push the operation that sends a request to the servers of ``key``.

        It queues the exchange when its arrays are ready, since no order between processes is needed.
        """
        exchange = self._request(key, verb, rate)

        def start(on_complete: OnComplete) -> None:
            part = TicketPart()
            part.arrive((values.raw(),), (values.raw(),), None, on_complete)
            self._sequencer.put(Ticket(f"{verb.name.lower()} {key!r}", [part], exchange))

        get_engine().push_async(
            start, reads, (self._stored[key].var,), cpu(0), priority=priority, name=f"KVStore{verb.name.title()}"
        )

    def _request(self, key: Key, verb: Verb, rate: float | None) -> Exchange:
        number, versions = self._keys.number(key), self._versions[key]
        ranges = self._ranges[key]

        def exchange(
            group: RankGroup, shares: Sequence[Array], values: Sequence[Array], what: str, failure: str | None
        ) -> Steps[None]:
            del shares  # the same arrays as `values`
            if failure is not None:
                raise KVStoreError(f"{what}: {failure}")
            flat = values[0].reshape(-1)
            requests = [
                (server, Header(verb, number, version, flat[a:b].nbytes * (verb is Verb.PUSH), rate), flat[a:b])
                for (server, a, b), version in zip(ranges, versions, strict=True)
            ]
            answers = yield from ask(self._mpi, self._comm, requests, group, what)
            versions[:] = [answer.version for answer, _ in answers]

        return exchange

    def _job_position(self) -> JobPosition:
        return JobPosition(self.num_workers, self.rank, self._group.shares_memory)

    # -- optimizer ------------------------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: object) -> None:
        """Make the servers apply a copy of ``optimizer``; its current learning rate is sent with each push.

        Every rank calls this and waits for the other ranks.

        Raises:
            KVStoreError: the optimizers of the ranks differ.
        """
        with rollback(self), self._server.rollback():
            super().set_optimizer(optimizer)
            self._updater = None  # the server has the updater
            ours: Any = copies.deepcopy(optimizer)
            ours.lr_scheduler = None  # each push brings the worker's learning rate, which sets `lr`
            self._server.use(Updater(ours))
            self._optimizer = optimizer
            self._meet("begin with this optimizer")

    def _states(self) -> Updater:
        """Return an updater that reads and replaces the states on all servers; no other process need make a call."""
        if self._optimizer is None:
            return super()._states()  # raises KVStoreError
        return ServerStates(self._optimizer, self._partition, self._ask_now)

    def _partition(self) -> dict[Key, tuple[tuple[int, ...], int, list[tuple[JobRank, int, int]]]]:
        return {k: (value.shape, self._keys.number(k), self._ranges[k]) for k, value in self._stored.items()}

    def _ask_now(self, requests: Sequence[tuple[JobRank, Header, Array]], what: str) -> list[tuple[Header, Array]]:
        """Send requests to servers after all earlier pushes of this process, and return the answers."""
        self._await_pushes()
        answers: list[tuple[Header, Array]] = self._sequencer.call(
            lambda group: ask(self._mpi, self._comm, requests, group, what)
        )
        return answers

    def _await_pushes(self) -> None:
        # A push enters the sequencer's queue only when its sum is ready: wait for it, or a later call overtakes it.
        for stored in list(self._stored.values()):
            get_engine().wait_until_written(stored.var)

    def barrier(self) -> None:
        """Wait until every process has called this; servers have then applied all earlier pushes of all processes."""
        self._await_pushes()
        super().barrier()

    _barrier = barrier

    def statistics(self) -> dict[str, int]:
        """Return the statistics of ``local`` and of this process's server.

        ``server_bytes``: values and gradients; ``pushes``: pushes applied; ``staleness_max`` and ``staleness_sum``:
        greatest staleness of a push, and the sum over all pushes.
        """
        return {
            **super().statistics(),
            "server_bytes": self._server.nbytes,
            "pushes": self._server.pushes,
            "staleness_max": self._server.staleness_max,
            "staleness_sum": self._server.staleness_sum,
        }

    def recover(self) -> int:
        """Raise an error: the values on the server of the dead process are lost.

        Raises:
            KVStoreError: always.
        """
        raise KVStoreError(
            "dist_async cannot go on after a death, which takes values with it: start again from a checkpoint"
        )

    def _end(self) -> None:
        # A push enters the sequencer's queue only when its sum is ready: wait for all before closing the queue.
        written = threading.Event()
        values = [stored.var for stored in list(self._stored.values())]
        failed = program_end.failure() is not None
        if not self._sequencer.closed and not failed:
            get_engine().push(written.set, values, (), cpu(0), name="KVStoreEnd", prop=FnProperty.NO_SKIP)
            wait_driving(written, EXIT_S)
        super()._end()
        self._server.end(FAILED_S if failed else EXIT_S, failed=failed)


class RatedOptimizer(OptimizerProtocol, Protocol):
    """An optimizer with a learning rate, which a worker sends with each push."""

    lr: float
    num_update: int


def _rate(optimizer: RatedOptimizer) -> float:
    """Return the current learning rate of an optimizer, by its schedule if it has one."""
    scheduler = getattr(optimizer, "lr_scheduler", None)
    if scheduler is not None:
        return float(scheduler(optimizer.num_update))
    return float(optimizer.lr)
