"""Base class of distributed stores: the group of processes, the thread for exchanges, and initial values of rank 0."""

from __future__ import annotations

import atexit
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from weftplan import config
from weftplan.device.context import cpu_pinned
from weftplan.engine.shield import shielded, unbroken
from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.arrays.piece_copies import Mover
from weftplan.kvstore.distributed.exchange.bucket_operation import BucketPart
from weftplan.kvstore.distributed.exchange.sequencer import Sequencer
from weftplan.kvstore.distributed.exchange.tickets import Ticket, TicketPart
from weftplan.kvstore.distributed.group.group import RankGroup
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.transport import mpi
from weftplan.kvstore.distributed.transport.elastic_job import ElasticJob
from weftplan.kvstore.distributed.transport.formation import Formation
from weftplan.kvstore.distributed.transport.mpi_types import JobRank, Position
from weftplan.kvstore.distributed.transport.shutdown import note_loss
from weftplan.kvstore.fixed_order_sums import Array
from weftplan.kvstore.keys import Key
from weftplan.kvstore.local import KVStoreLocal
from weftplan.kvstore.stages import HOST, RepeatedExchange, copy
from weftplan.kvstore.updater import Updater
from weftplan.kvstore.updating import UpdaterFunction
from weftplan.ndarray import NDArray, empty
from weftplan.support import program_end, slots
from weftplan.support.rollback import rollback

EXIT_S = 30.0
"""Seconds allowed for the last exchanges of a process that ends normally."""
FAILED_S = 2.0
"""Seconds allowed for the last exchanges of a process that has failed."""


class KVStoreDist(KVStoreLocal):
    """A store shared by the processes of a job, with initial values from rank 0, barriers, and a thread for exchanges.

    Every process must make the same calls in the same order.
    """

    _inline = 1 << 19
    """Maximum bytes of a copy that runs on the thread that makes it ready.

    Processes share the machine's cores, so waking a worker takes longer than such a copy.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        job = ElasticJob.of_this_process()
        self._formation = None if job is None else Formation(job)
        self._sharing["threads"] = min(self._sharing["threads"], mpi.cores_of_this_process())
        self._group = RankGroup(
            mpi.connect(mpi.start()) if self._formation is None else self._formation.connect(),
            stall_s=float(config.get("WEFTPLAN_KVSTORE_STALL")),
            timeout_s=float(config.get("WEFTPLAN_KVSTORE_TIMEOUT")),
            mover=Mover(**self._sharing),
        )
        self._sequencer = Sequencer(self._group, name)
        slots.WAIT_HELPERS.get().append(self._sequencer.help)
        self._wire: dict[Key, NDArray] = {}
        """Copies in host memory of arrays on devices, by key, for the exchange between processes."""
        self._at_exit = _once_at_exit(self._end)
        self._meet(f"create the store {name!r}")
        self._sequencer.call(RankGroup.share_memory)

    def init(self, key: object, value: object) -> None:
        """Create keys with the values of rank 0; every rank passes values of the same shapes and dtypes.

        Raises:
            KVStoreError: a key exists already or has several values, or a key or value has a wrong type. An error on
                another rank is raised when the value is read.
        """
        with self._turn:
            self._sequencer.check()
            new_values = self._new_values(key, value)
            with rollback(self):
                super().init(key, value)
                for k, _ in new_values:
                    self._from(None, "init", k, self._stored[k])

    def _checked(self, key: object, value: object, what: str, verb: str) -> list[tuple[Key, list[NDArray]]]:
        with self._naming_this_rank():
            return super()._checked(key, value, what, verb)

    def _new_values(self, key: object, value: object) -> list[tuple[Key, NDArray]]:
        with self._naming_this_rank():
            return super()._new_values(key, value)

    @contextlib.contextmanager
    def _naming_this_rank(self) -> Iterator[None]:
        """Add this rank to the message of a KVStoreError, because the same call may be right on other ranks."""
        try:
            yield
        except KVStoreError as error:
            raise KVStoreError(f"rank {self._group.rank}: {error}") from None

    def _repeat(self, calls: Mapping[Key, RepeatedExchange], key: object, arrays: object) -> bool:
        if calls is not self._pulls:
            return False
        self._sequencer.hurry()  # runs small ready exchanges now, so that their sums can be copied inline
        return super()._repeat(calls, key, arrays)

    def _exchange_bucket(
        self,
        ticket: Callable[[TicketPart], Ticket],
        items: Sequence[tuple[Key, NDArray, NDArray]],
        priority: int,
    ) -> None:
        """Queue the exchange of a bucket, and push the operation that waits for it.

        Args:
            ticket: function that returns the ticket of the exchange for a part.
            items: (key, array to send, array that receives the result); may be the same array.
            priority: engine priority of the operation.
        """
        sources, totals, copies_back = [], [], []
        for key, source, total in items:
            if total.context.device_type in HOST:
                sources.append(source)
                totals.append(total)
                continue
            wire = self._wire.setdefault(key, empty(total.shape, ctx=cpu_pinned(0), dtype=total.np_dtype))
            copy(source, wire, priority)
            sources.append(wire)
            totals.append(wire)
            copies_back.append((wire, total))
        with shielded():  # Ctrl-C between the two calls would leave a ticket whose part never arrives
            unbroken()
            part = BucketPart(sources, totals)
            # Queue first: on an engine that runs operations inline, the push waits for the exchange.
            self._sequencer.put(ticket(part))
            try:
                part.push(priority)
            except BaseException as error:
                part.fail(error)  # the other ranks wait for it
                raise
        for wire, total in copies_back:
            copy(wire, total, priority)

    def _from(self, root: JobRank | None, verb: str, key: Key, array: NDArray) -> None:
        """Queue a broadcast of a key's ``array`` from a rank, or the first; ``verb`` names the method in errors."""
        description = f"{verb} {described(key, array)}"

        def exchange(
            group: RankGroup, shares: Sequence[Array], arrays: Sequence[Array], what: str, failure: str | None
        ) -> Steps[None]:
            del shares  # the same array
            return group.broadcast(arrays[0] if arrays else np.empty(0, np.uint8), root, what, failure)

        self._exchange_bucket(lambda part: Ticket(description, [part], exchange), [(key, array, array)], 0)

    def set_updater(self, updater: UpdaterFunction | None) -> None:
        """Set the updater; every rank calls this, or ``set_optimizer``, with an equal updater and waits for the others.

        Raises:
            KVStoreError: the optimizers of the ranks differ in class or settings. The old updater stays.
        """
        self._meet(f"use {_named(updater)}")
        super().set_updater(updater)

    _set_updater = set_updater

    def _send_command_to_servers(self, head: int, body: str) -> None:
        """Raise KVStoreError: no process accepts commands."""
        del head, body
        raise KVStoreError(
            f"a store {self.type!r} has no servers that take commands: call set_optimizer or set_gradient_compression "
            f"on every process, which reach whoever updates"
        )

    def _meet(self, description: str) -> None:
        """Wait for all processes; raise KVStoreError unless all pass the same description of their next step."""
        self._sequencer.call(lambda group: group.meet(description))

    # -- the group ------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> Position:
        """The index of this process among the processes that share the store.

        For a replacement that has not joined them yet: its rank in the job.
        """
        return Position(self._group.rank) if self._group.is_alone else self._group.position

    @property
    def shares_memory(self) -> bool:
        """True if the processes exchange data in shared memory, because all run on one host."""
        return self._group.shares_memory

    @property
    def num_workers(self) -> int:
        """The number of processes that share the store.

        For a replacement that has not joined them yet: the number of processes in the job.
        """
        return self._group.job_size if self._group.is_alone else len(self._group.members)

    def barrier(self) -> None:
        """Wait until every process has called this and all earlier pushes have been exchanged.

        Raises:
            KVStoreError: a process makes another call.
            WorkerLostError: a process has died, or does not call this in time.
        """
        self._meet("meet at a barrier")

    _barrier = barrier

    def agree(self, what: str) -> None:
        """Wait as :meth:`barrier` does; raise KVStoreError unless all processes pass the same description ``what``."""
        self._meet(what)

    def close(self) -> None:
        """Leave the group; the other processes go on without this process. Called automatically at exit.

        If the program has failed (by an exception, also while it is handled, or by an exit status other than 0), the
        other processes get a :class:`~weftplan.errors.WorkerLostError` that quotes the failure.
        """
        self._at_exit()

    def _end(self) -> None:
        why = program_end.failure()
        if why:
            note_loss()  # exit without MPI_Finalize, which would wait for the other processes
        # Close before this process stops helping: the other processes wait for the queued exchanges.
        self._sequencer.close(FAILED_S if why else EXIT_S, why)
        slots.WAIT_HELPERS.get().remove(self._sequencer.help)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.type!r}: {len(self._stored)} keys, rank {self.rank} of {self.num_workers}"
            f"{self._described_updater()}>"
        )


def described(key: Key, array: NDArray) -> str:
    """Return a key with the shape and dtype of its array."""
    return f"{key!r} {array.shape} {array.np_dtype}"


def arrays_in(state: object) -> Iterator[NDArray]:
    """Yield the arrays of an optimizer's state."""
    if isinstance(state, NDArray):
        yield state
    elif isinstance(state, tuple | list):
        for item in state:
            yield from arrays_in(item)


def _once_at_exit(end: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls ``end`` once: when it is called, or at exit if it was not called before."""
    has_run: list[bool] = []

    def at_exit() -> None:
        atexit.unregister(at_exit)
        if not has_run:
            has_run.append(True)
            end()

    atexit.register(at_exit)
    return at_exit


def _named(updater: UpdaterFunction | None) -> str:
    """Return the text by which ranks compare updaters: an optimizer's settings, but the same text for all functions."""
    if updater is None:
        return "no updater"
    if not isinstance(updater, Updater):
        return "an updater"
    scheduler = getattr(updater.optimizer, "lr_scheduler", None)
    words = f"the optimizer {_settings(updater.optimizer)}"
    return words if scheduler is None else f"{words} with {_settings(scheduler)}"


def _settings(settled: object) -> str:
    """Return the class, public plain attributes and multipliers of an optimizer or learning rate schedule as text."""
    plain, multipliers = {}, {}
    for name, value in sorted(vars(settled).items()):
        numbers = isinstance(value, list | tuple) and all(isinstance(item, (int, float)) for item in value)
        if (numbers or isinstance(value, (int, float, str, bool, type(None)))) and not name.startswith("_"):
            plain[name] = value
        elif name in ("lr_mult", "wd_mult") and value:
            multipliers[name] = {str(key): value[key] for key in value}
    return f"{type(settled).__name__} {json.dumps(plain | multipliers, sort_keys=True)}"
