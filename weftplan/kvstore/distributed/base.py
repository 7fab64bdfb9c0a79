"""Base class of distributed stores: rank in the job, exchange thread, initial values of rank 0."""

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
from weftplan.kvstore.distributed.exchange.tickets import Part, Ticket
from weftplan.kvstore.distributed.group.group import Group
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.transport import mpi
from weftplan.kvstore.distributed.transport.elastic_job import ElasticJob
from weftplan.kvstore.distributed.transport.formation import Formation
from weftplan.kvstore.distributed.transport.shutdown import note_loss
from weftplan.kvstore.keys import Key
from weftplan.kvstore.local import KVStoreLocal
from weftplan.kvstore.reduce import Array
from weftplan.kvstore.stages import HOST, Repeated, copy
from weftplan.kvstore.updater import Updater
from weftplan.kvstore.updating import UpdaterFunction
from weftplan.ndarray import NDArray, empty
from weftplan.support import program_end, slots

EXIT_S = 30.0
"""Seconds that a process which ends gives its last exchanges."""
FAILED_S = 2.0
"""Seconds that a process which fails gives them."""


class KVStoreDist(KVStoreLocal):
    """A member of a job: its place, its thread for exchanges, initial values of rank 0, barriers."""

    _inline = 1 << 19
    """Most bytes of a copy that runs inline: handing it to a worker takes longer than the copy, since processes share
    cores."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        job = ElasticJob.of_this_process()
        self._formation = None if job is None else Formation(job)
        self._sharing["threads"] = min(self._sharing["threads"], mpi.cores_of_this_process())
        self._group = Group(
            mpi.connect(mpi.start()) if self._formation is None else self._formation.first(),
            stall_s=float(config.get("WEFTPLAN_KVSTORE_STALL")),
            timeout_s=float(config.get("WEFTPLAN_KVSTORE_TIMEOUT")),
            mover=Mover(**self._sharing),
        )
        self._sequencer = Sequencer(self._group, name)
        slots.WAIT_HELPERS.get().append(self._sequencer.help)
        self._wire: dict[Key, NDArray] = {}
        """Host copies of device arrays for the exchange."""
        self._at_exit = _once_at_exit(self._end)
        self._meet(f"create the store {name!r}")
        self._sequencer.call(Group.share_memory)

    def init(self, key: object, value: object) -> None:
        """Create keys with the values of rank 0; every rank passes a value of the same shape and dtype.

        Raises:
            KVStoreError: as ``local``; reading the value raises the other ranks' errors.
        """
        with self._turn:
            self._sequencer.check()
            new_values = self._new_values(key, value)
            super().init(key, value)
            for k, _ in new_values:
                self._from(0, "init", k, self._stored[k])

    def _checked(self, key: object, value: object, what: str, verb: str) -> list[tuple[Key, list[NDArray]]]:
        with self._naming_this_rank():
            return super()._checked(key, value, what, verb)

    def _new_values(self, key: object, value: object) -> list[tuple[Key, NDArray]]:
        with self._naming_this_rank():
            return super()._new_values(key, value)

    @contextlib.contextmanager
    def _naming_this_rank(self) -> Iterator[None]:
        """Name this rank in the error of a call that other ranks may make rightly."""
        try:
            yield
        except KVStoreError as error:
            raise KVStoreError(f"rank {self.rank}: {error}") from None

    def _repeat(self, calls: Mapping[Key, Repeated], key: object, arrays: object) -> bool:
        if calls is not self._pulls:
            return False
        self._sequencer.hurry()  # small exchanges that are ready are made now, so that the sums can be copied inline
        return super()._repeat(calls, key, arrays)

    def _exchange_bucket(
        self,
        ticket: Callable[[Part], Ticket],
        items: Sequence[tuple[Key, NDArray, NDArray]],
        priority: int,
    ) -> None:
        """Push the operation that exchanges the arrays of a bucket, and queue its exchange.

        The exchange is queued before the push, which on an engine that runs operations inline waits for it.

        Args:
            ticket: makes the exchange.
            items: (key, array, array that receives the result).
        """
        sources, totals, back = [], [], []
        for key, source, total in items:
            if total.context.device_type in HOST:
                sources.append(source)
                totals.append(total)
                continue
            wire = self._wire.setdefault(key, empty(total.shape, ctx=cpu_pinned(0), dtype=total.dtype))
            copy(source, wire, priority)
            sources.append(wire)
            totals.append(wire)
            back.append((wire, total))
        with shielded():
            unbroken()
            part = BucketPart(sources, totals)
            self._sequencer.put(ticket(part))
            part.push(priority)
        for wire, total in back:
            copy(wire, total, priority)

    def _from(self, root: int, verb: str, key: Key, array: NDArray) -> None:
        """Queue that the ``array`` of a key becomes that of rank ``root``."""
        description = f"{verb} {described(key, array)}"

        def exchange(
            group: Group, shares: Sequence[Array], arrays: Sequence[Array], what: str, failure: str | None
        ) -> Steps[None]:
            del shares  # the same array
            return group.broadcast(arrays[0] if arrays else np.empty(0, np.uint8), root, what, failure)

        self._exchange_bucket(lambda part: Ticket(description, [part], exchange), [(key, array, array)], 0)

    def set_updater(self, updater: UpdaterFunction | None) -> None:
        """Set the updater as in ``local``. Every rank calls this, or ``set_optimizer``, with an equal updater, and
        waits.

        Raises:
            KVStoreError: ranks pass updaters that differ, as far as can be compared. The store keeps its old updater.
        """
        self._meet(f"use {_named(updater)}")
        super().set_updater(updater)

    _set_updater = set_updater

    def _send_command_to_servers(self, head: int, body: str) -> None:
        """Raises KVStoreError: no process takes commands."""
        del head, body
        raise KVStoreError(
            f"a store {self.type!r} has no servers that take commands: call set_optimizer or set_gradient_compression "
            f"on every process, which reach whoever updates"
        )

    def _meet(self, description: str) -> None:
        """Wait for all processes, and compare what they are about to do."""
        self._sequencer.call(lambda group: group.meet(description))

    # -- the group ------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's place among those that share the store, from 0."""
        return self._group.rank if self._group.is_alone else self._group.position

    @property
    def shares_memory(self) -> bool:
        """True where exchanges go through memory that the processes of one host share."""
        return self._group.shares_memory

    @property
    def num_workers(self) -> int:
        """How many processes share the store now."""
        return self._group.job_size if self._group.is_alone else len(self._group.members)

    def barrier(self) -> None:
        """Wait until every process is here and all that was pushed before has been exchanged.

        Raises:
            KVStoreError: a process does something else, or does not come in time.
            WorkerLostError: a process died.
        """
        self._meet("meet at a barrier")

    _barrier = barrier

    def agree(self, what: str) -> None:
        """Wait as :meth:`barrier` does, before every process does ``what``, in words; raise if they differ."""
        self._meet(what)

    def close(self) -> None:
        """Take part in no exchange any more; the others go on without this process. A process that ends does this.

        If the program ends by an exception or with a status other than 0, or while an exception is handled, the others
        get a :class:`~weftplan.errors.WorkerLostError` that quotes it.
        """
        self._at_exit()

    def _end(self) -> None:
        why = program_end.failure()
        if why:
            note_loss()  # do not wait for the other processes, which have to stop
        self._sequencer.close(FAILED_S if why else EXIT_S, why)
        slots.WAIT_HELPERS.get().remove(self._sequencer.help)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.type!r}: {len(self._stored)} keys, rank {self.rank} of {self.num_workers}"
            f"{self._described_updater()}>"
        )


def described(key: Key, array: NDArray) -> str:
    """Return a key with the shape and dtype of its array."""
    return f"{key!r} {array.shape} {array.dtype}"


def arrays_in(state: object) -> Iterator[NDArray]:
    """Yield the arrays of an optimizer's state."""
    if isinstance(state, NDArray):
        yield state
    elif isinstance(state, tuple | list):
        for item in state:
            yield from arrays_in(item)


def _once_at_exit(end: Callable[[], None]) -> Callable[[], None]:
    """A function that calls ``end`` when it is called or when the process ends, whichever comes first."""
    done: list[bool] = []

    def at_exit() -> None:
        atexit.unregister(at_exit)
        if not done:
            done.append(True)
            end()

    atexit.register(at_exit)
    return at_exit


def _named(updater: UpdaterFunction | None) -> str:
    """Return the part of an updater that must be equal on all ranks; functions cannot be compared."""
    if updater is None:
        return "no updater"
    if not isinstance(updater, Updater):
        return "an updater"
    scheduler = getattr(updater.optimizer, "lr_scheduler", None)
    words = f"the optimizer {_settings(updater.optimizer)}"
    return words if scheduler is None else f"{words} with {_settings(scheduler)}"


def _settings(settled: object) -> str:
    """Return the class and the plain settings of an optimizer or a schedule, and its multipliers for some keys."""
    plain, multipliers = {}, {}
    for name, value in sorted(vars(settled).items()):
        numbers = isinstance(value, list | tuple) and all(isinstance(one, (int, float)) for one in value)
        if (numbers or isinstance(value, (int, float, str, bool, type(None)))) and not name.startswith("_"):
            plain[name] = value
        elif name in ("lr_mult", "wd_mult") and value:
            multipliers[name] = {str(key): value[key] for key in value}
    return f"{type(settled).__name__} {json.dumps(plain | multipliers, sort_keys=True)}"
