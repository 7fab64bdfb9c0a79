"""A training program whose ranks exit or die after chosen batches, and ``run_job``, which launches it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kvstore.ranks import need_mpi

ROOT = Path(__file__).parents[2]
EPOCHS, BATCHES = 4, 6

KINDS = ("raise", "sys.exit", "os._exit", "SIGKILL", "later")
"""How a rank can end after a batch. ``later`` is a SIGKILL up to 10 ms later, possibly in the middle of an exchange."""

PROGRAM = r"""
import hashlib, json, os, random, signal, sys, threading, time
import numpy as np
import weftplan as mx
from weftplan.data.worker_share import PartOfBatchIter

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")  # in one piece, because ranks share a pipe
    sys.stdout.flush()

folder, settings = sys.argv[1], json.loads(sys.argv[2])
kv = mx.kv.create(settings["store"])
say("start", kv.rank, kv.num_workers, os.getpid())
if settings["own_sum"]:
    kv.init("own", mx.nd.zeros((3,)))
    kv.push("own", mx.nd.ones((3,)))
mx.random.seed(7)
rng = np.random.default_rng(7)
batches, size = settings["batches"], 4 * kv.num_workers
data = rng.standard_normal((batches * size, 20)).astype("f4")
whole = mx.io.NDArrayIter(data, data[:, :10].argmax(1).astype("f4"), batch_size=size, shuffle=True)
part = PartOfBatchIter(whole, rank=kv.rank, num_workers=kv.num_workers)
net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=settings["hidden"])
net = mx.sym.Dropout(mx.sym.Activation(mx.sym.BatchNorm(net, name="bn"), act_type="relu"), p=0.3)
net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=10), name="softmax")

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def end(param):
    place = f"{kv.rank} {param.epoch} {param.nbatch}"
    done = os.path.join(folder, place)
    if place not in settings["ends"] or os.path.exists(done):
        return
    open(done, "w").close()
    kind = settings["ends"][place]
    say("end", place, kind)
    if kind == "raise":
        raise OSError("cannot read image 17")
    if kind == "sys.exit":
        sys.exit(3)
    if kind == "os._exit":
        os._exit(4)
    if kind == "fork" and not os.fork():
        os.setsid()  # out of reach of the launcher
        os.close(1)
        os.close(2)
        until = time.monotonic() + 90
        while time.monotonic() < until and not os.path.exists(os.path.join(folder, "over")):
            time.sleep(0.1)
        open(os.path.join(folder, "waited" if time.monotonic() >= until else "heard"), "w").close()
        os._exit(0)
    if kind == "later":
        threading.Timer(random.Random(place).random() * 0.01, kill).start()
        return
    kill()

module = mx.mod.Module(net)
begin = 0
for store in settings["stores"]:
    if store == "new":
        kv = mx.kv.create(settings["store"])
        module = mx.mod.Module(net)
    module.fit(part, kvstore=kv, begin_epoch=begin, num_epoch=begin + settings["epochs"], batch_end_callback=end,
               optimizer=settings["optimizer"], optimizer_params={"learning_rate": 0.01}, **settings["fit"])
    begin += settings["epochs"]
open(os.path.join(folder, "over"), "w").close()
args, _ = module.get_params()
states = module._states_holder().states
digest = hashlib.sha256(b"".join(args[key].asnumpy().tobytes() for key in sorted(args)))
for key in sorted(states, key=str):
    for state in states[key] if isinstance(states[key], tuple) else (states[key],):
        digest.update(b"" if state is None else state.asnumpy().tobytes())
say("weights", kv.rank, kv.num_workers, digest.hexdigest(), os.getpid())
"""


@dataclass(frozen=True, slots=True)
class Job:
    """The result of a job that has finished.

    Attributes:
        status: the exit status of the launcher.
        weights: for each rank that finished training, a digest of its weights and optimizer states.
        starts: how many processes started, including replacements.
        ends: how many of the requested ends of ranks have happened.
        survivors: how many of the initial processes, without replacements, finished training.
        output: the standard output of all processes.
        errors: their standard error.
    """

    status: int
    weights: dict[int, str]
    starts: int
    ends: int
    survivors: int
    output: str
    errors: str


def run_job(
    folder: Path,
    ranks: int,
    ends: dict[str, str],
    *,
    restarts: int = 0,
    timeout: float = 240,
    store: str = "dist_sync",
    epochs: int = EPOCHS,
    hidden: int = 100,
    optimizer: str = "adam",
    fit: dict[str, object] | None = None,
    stores: Sequence[str] = ("first",),
    own_sum: bool = False,
    **variables: str,
) -> Job:
    """Run the training program in ``ranks`` processes and return its result.

    Args:
        folder: a folder to create for the job.
        ends: maps ``"RANK EPOCH BATCH"`` to how this rank ends after this batch: one of ``KINDS``, or ``fork``, which
            leaves a child process running and kills the rank.
        restarts: how many replacements the launcher may start. The job is elastic unless this is 0.
        timeout: seconds after which the test fails.
        fit: more keyword arguments of ``Module.fit``.
        stores: the store of each ``fit`` of the program: ``first``, or ``new`` with a new module.
        own_sum: whether the program sums over the ranks before it trains.
        variables: environment variables of the launcher and of the ranks.
    """
    need_mpi()
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(PROGRAM)
    settings = {
        "store": store, "ends": ends, "batches": BATCHES, "epochs": epochs, "hidden": hidden, "optimizer": optimizer,
        "fit": fit or {}, "stores": stores, "own_sum": own_sum,
    }  # fmt: skip
    elastic = ["--elastic", "--restarts", str(restarts)] if restarts else []
    arguments = ["-n", str(ranks), *elastic, str(script), str(folder), json.dumps(settings)]
    child = subprocess.Popen(
        [sys.executable, "-m", "weftplan", "launch", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "WEFTPLAN_KVSTORE_TIMEOUT": "200",
            **variables,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGTERM)
        output, errors = child.communicate()
        pytest.fail(f"no end after {timeout} s: {output}{errors}")
    lines = re.findall(r"weights (\d+) (\d+) (\w{64}) (\d+)", output)
    assert all(int(line[1]) == ranks for line in lines), output
    starts = re.findall(r"start \d+ \d+ (\d+)", output)
    return Job(
        child.returncode,
        {int(line[0]): line[2] for line in lines},
        len(starts),
        len(re.findall(r"^end \d", output, re.MULTILINE)),
        len({line[3] for line in lines} & set(starts[:ranks])),
        output,
        errors,
    )
