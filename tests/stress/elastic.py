"""Elastic jobs whose ranks end at random batches: by an exception, ``sys.exit``, ``os._exit`` or SIGKILL.

    python -m tests.stress.elastic SEED COUNT       until COUNT ranks have ended

Each job trains on three or four ranks, and several ranks end: at random epochs and batches, sometimes two at the same
batch, some a few milliseconds into the next exchange. A replacement may end, too. Stores, checkpoints and the transport
of messages change from job to job. The final weights must have the bits of a job without a loss. No job may start all
processes again, unless all ranks end at the same batch. The output is the number of wrong jobs and of hung jobs. Exit
status 1 means an error.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.kvstore.elastic_jobs import BATCHES, EPOCHS, KINDS, run_job


@lru_cache
def weights_without_loss(ranks: int, on_store: int) -> str:
    """Return the final weights of a job without a loss, started by mpiexec.

    ``on_store`` is 1 if the store updates the weights, else 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = run_job(Path(folder) / "job", ranks, {}, MXNET_UPDATE_ON_KVSTORE=str(on_store))
    assert done.status == 0, done.errors
    assert len(done.weights) == ranks
    (weights,) = set(done.weights.values())
    return weights


def random_ends(chance: random.Random, ranks: int, count: int) -> dict[str, str]:
    """Return ``count`` planned exits as {"rank epoch batch": kind}; about a third are at the previous exit's batch."""
    ends: dict[str, str] = {}
    epoch, batch = 0, 0
    while len(ends) < count:
        if not ends or chance.random() > 1 / 3:
            epoch, batch = chance.randrange(EPOCHS), chance.randrange(BATCHES)
        ends.setdefault(f"{chance.randrange(ranks)} {epoch} {batch}", chance.choice(KINDS))
    return ends


def losses(seed: int, count: int, each: int = 5) -> tuple[int, int, int, Counter[str]]:
    """Run jobs, each with up to ``each`` planned exits of ranks, until ``count`` exits have been planned.

    Return the numbers of wrong jobs, hung jobs and all jobs, and the number of planned exits of each kind.
    """
    chance = random.Random(seed)
    wrong = hung = jobs = 0
    kinds = Counter[str]()
    while kinds.total() < count:
        jobs += 1
        ranks = chance.choice((3, 4))
        ends = random_ends(chance, ranks, min(each, count - kinds.total()))
        fit: dict[str, Any] = {}
        on_store = int(chance.random() < 0.7)
        with tempfile.TemporaryDirectory() as folder:
            if chance.random() < 0.5:
                fit = {"checkpoint": f"{folder}/run", "every": chance.choice((None, 2, 5)), "resume": True}
            try:
                done = run_job(
                    Path(folder) / "job",
                    ranks,
                    ends,
                    restarts=len(ends) + 1,
                    timeout=1500,
                    store=chance.choice(("dist_sync", "dist_device_sync")),
                    fit=fit,
                    MXNET_UPDATE_ON_KVSTORE=str(on_store),
                    WEFTPLAN_KVSTORE_TIMEOUT="600",
                    WEFTPLAN_KVSTORE_SHARED_MEMORY=str(chance.randrange(2)),
                )
            except pytest.fail.Exception as error:
                hung += 1
                kinds.update(ends.values())
                print(f"job {jobs}, {ends}: HANG {error}", flush=True)
                continue
        kinds.update(ends.values())
        # If all ranks end at one batch, no survivor has the state: then all start again, and may skip a planned end.
        at_once = max(Counter(place.split(" ", 1)[1] for place in ends).values()) == ranks
        right = done.status == 0 and (at_once or (done.starts == ranks + done.ends and done.ends == len(ends)))
        right = right and list(done.weights.values()) == [weights_without_loss(ranks, on_store)] * ranks
        if not right:
            wrong += 1
            print(f"job {jobs}, {ranks} ranks, {ends}: WRONG\n{done.output}\n{done.errors[-6000:]}", flush=True)
    return wrong, hung, jobs, kinds


def main() -> None:
    """Run the jobs, print the result, and exit with status 1 on an error."""
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    wrong, hung, jobs, kinds = losses(seed, count)
    shown = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    print(f"seed {seed}: {kinds.total()} ranks replaced in {jobs} jobs ({shown}), {wrong} wrong, {hung} hangs")
    sys.exit(bool(wrong or hung))


if __name__ == "__main__":
    main()
