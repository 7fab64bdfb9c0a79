"""Processes of a job that are killed at random moments, and exchanges whose arrays arrive in random orders.

    python -m tests.stress.kills kills SEED COUNT       until COUNT processes have been killed
    python -m tests.stress.kills hosts SEED COUNT       the same over three emulated hosts (as root)
    python -m tests.stress.kills async SEED COUNT       COUNT jobs of dist_async with one killed process each
    python -m tests.stress.kills orders SEED COUNT      COUNT orders of arrival

``kills`` and ``hosts`` start jobs of four processes; one to three of them send themselves SIGKILL at random moments of
a loop of pushes. The others must get an error, recover, and continue with right sums. The output is the number of wrong
sums and hung jobs, and the seconds from an error to the end of ``recover``.

In ``async`` every survivor must get an error and end.

``orders`` pushes the same gradients repeatedly with varying threads, priorities, buckets, arrival times and transport
(shared memory or MPI). All bits must be equal, and the printed digest does not depend on the seed.

Exit status 1 means an error.
"""

from __future__ import annotations

import contextlib
import random
import re
import statistics
import sys
import tempfile
from pathlib import Path

import pytest

from tests.kvstore.ranks import run_ranks
from tests.stress.hosts import Hosts, emulated

RANKS = 4

KILLS = """
    import random, threading
    chance = random.Random(int(os.environ["SEED"]))
    dying = {int(word) for word in os.environ["DYING"].split(",")}
    moments = [chance.random() * float(os.environ["LONGEST"]) for _ in range(size)]
    sizes = [3, 700, 5000, 300000]
    me, left = rank, size - len(dying)
    for i, n in enumerate([*sizes, 2 * size]):
        kv.init(i, mx.nd.zeros((n,)))
    late = [len(sizes) + 1, len(sizes) + 2]
    for key in late:
        kv.init(key, mx.nd.zeros((30000,)))
    gradients, pulled = ([mx.nd.zeros((30000,)) for _ in late] for _ in range(2))
    last, due = [0, 0], 0
    kv.barrier()
    if me in dying:
        def end():
            time.sleep(moments[me])
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=end, daemon=True).start()

    def agree(step):
        # The largest step of all, and whether all have seen the last death.
        mine = np.zeros(2 * size, "f4")
        mine[me], mine[size + me] = step, len(kv._group.members) == left
        kv.push(len(sizes), mx.nd.array(mine))
        every = value(len(sizes), (2 * size,))
        return int(every[:size].max()), every[size:].sum() == left

    sums, step, begun = 0, 0, None
    while True:
        try:
            if begun is not None:
                kv.recover()
                for place, key in enumerate(late):  # the two keys may be one exchange or two
                    stored = value(key, (30000,))
                    if not ((stored == last[place]).all() or (stored == due).all()):
                        print("WRONG", me, step, "stored", stored[:3], stored[-3:], last, due, flush=True)
                    last[place] = stored[0]
                step, _ = agree(step)
                print("recovered %.4f" % (time.monotonic() - begun), flush=True)
                begun = None
            step += 1
            chance_of_all = random.Random(step)
            for i, n in enumerate(sizes):
                kv.push(i, mx.nd.full((n,), 2.0 ** me * step))
                total = value(i, (n,))
                want = sum(2.0 ** member for member in kv._group.members) * step
                if not (total == want).all():
                    print("WRONG", me, step, i, total[:3], want, flush=True)
                sums += 1
            for again in range(chance_of_all.randrange(6)):
                for gradient in gradients:
                    gradient[:] = 2.0 ** me * (step + 1000 * again)
                due = sum(2.0 ** member for member in kv._group.members) * (step + 1000 * again)
                if again % 2:
                    mx.nd.waitall()
                kv.pushpull(late, gradients, pulled)
                for out in pulled:
                    if not (out.asnumpy() == due).all():
                        print("WRONG", me, step, "again", out.asnumpy()[:3], due, flush=True)
                last = [due, due]
                sums += 1
            step, over = agree(step)
            if over:
                break
        except WorkerLostError:
            begun = time.monotonic() if begun is None else begun
    print("sums %d" % sums, flush=True)
    print("survived", me, flush=True)
"""

ORDERS = """
    import hashlib
    chance = np.random.default_rng(int(os.environ["SEED"]) * 1000 + rank)
    shapes = [(7,), (300, 11), (5, 5), (20000,), (1,), (2, 1500)]
    rng = np.random.default_rng(rank)
    values = [rng.standard_normal(shape).astype("f4") * 10.0 ** rng.integers(-3, 4, shape) for shape in shapes]
    for i, shape in enumerate(shapes):
        kv.init(i, mx.nd.zeros(shape))
    arrays = [mx.nd.array(v) for v in values]
    mx.nd.waitall()
    digests = set()
    for order in range(int(os.environ["COUNT"])):
        for i in chance.permutation(len(arrays)):  # each array becomes ready at a different time
            pause = float(chance.random() * 0.001)
            mx.engine.get().push(lambda pause=pause: time.sleep(pause), mutable_vars=[arrays[i].var])
        keys, outs = list(range(len(arrays))), [mx.nd.zeros(shape) for shape in shapes]
        if order % 3 == 0:
            for i in keys:
                kv.push(i, arrays[i], priority=int(chance.integers(-5, 5)))
            kv.pull(keys, outs)
        elif order % 3 == 1:
            kv.push(keys, arrays, priority=int(chance.integers(-5, 5)))
            kv.pull(keys, outs)
        else:
            kv.pushpull(keys, arrays, outs)
        pulled = [value(i, s).tobytes() for i, s in enumerate(shapes)]
        assert pulled == [out.asnumpy().tobytes() for out in outs]
        digests.add(hashlib.sha256(b"".join(pulled)).hexdigest())
    for digest in digests:
        print("digest", digest, flush=True)
"""


def kills(seed: int, count: int, hosts: Hosts | None = None) -> tuple[int, int, list[float], int]:
    """Run jobs until ``count`` processes have been killed.

    Return the numbers of wrong sums and hung jobs, the seconds of each recovery, and the number of right sums.
    """
    chance = random.Random(seed)
    wrong = hangs = right = killed = job = 0
    times: list[float] = []
    while killed < count:
        job += 1
        dying = chance.sample(range(RANKS), chance.randint(1, min(RANKS - 1, count - killed)))
        with tempfile.TemporaryDirectory() as folder:
            try:
                done = run_ranks(
                    Path(folder),
                    RANKS,
                    KILLS,
                    ok=False,
                    hosts=hosts,
                    FLAGS_fuse_parameter_groups_size=str(1 + job % 2),
                    SEED=str(seed * 1000 + job),
                    DYING=",".join(map(str, dying)),
                    LONGEST="1.0",
                )
            except pytest.fail.Exception as error:
                hangs += 1
                print(f"job {job}, dying {dying}: HANG {error}", flush=True)
                continue
        killed += len(dying)
        survived = done.stdout.count("survived")
        wrong += done.stdout.count("WRONG") + (survived != RANKS - len(dying))
        if survived != RANKS - len(dying) or "WRONG" in done.stdout:
            print(f"job {job}, dying {dying}: {survived} survived\n{done.stdout}\n{done.stderr[-3000:]}", flush=True)
        times += [float(text) for text in re.findall(r"recovered ([\d.]+)", done.stdout)]
        right += sum(int(text) for text in re.findall(r"sums (\d+)", done.stdout))
    return wrong, hangs, times, right


ASYNC = """
    import random, threading
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0, rescale_grad=1.0))
    for i in range(4):
        kv.init(i, mx.nd.zeros((5,) if i else (300000,)))
    kv.barrier()
    dying = int(os.environ["DYING"])
    if rank == dying:
        moment = random.Random(int(os.environ["SEED"])).random()
        def end():
            time.sleep(moment)
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=end, daemon=True).start()
    begun = time.monotonic()
    try:
        while True:
            for i in range(4):
                kv.push(i, mx.nd.ones((5,) if i else (300000,)))
                value(i, (5,) if i else (300000,))
    except WorkerLostError as error:
        print("told", rank, "%.1f" % (time.monotonic() - begun), flush=True)
"""


def asynchronous(seed: int, count: int) -> tuple[int, int]:
    """Run ``count`` jobs of dist_async, each with one killed process.

    Return the number of survivors that got an error, and of jobs in which a survivor got none or hung.
    """
    chance = random.Random(seed)
    told = failed = 0
    for job in range(count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                done = run_ranks(
                    Path(folder),
                    3,
                    ASYNC,
                    timeout=60,
                    ok=False,
                    STORE="dist_async",
                    SEED=str(seed * 1000 + job),
                    DYING=str(chance.randrange(3)),
                    WEFTPLAN_KVSTORE_TIMEOUT="20",
                )
            except pytest.fail.Exception as error:
                failed += 1
                print(f"job {job}: HANG {error}", flush=True)
                continue
        heard = len(re.findall(r"told \d", done.stdout))
        told += heard
        if heard != 2:
            failed += 1
            print(f"job {job}: {heard} survivors were told\n{done.stdout}\n{done.stderr[-3000:]}", flush=True)
    return told, failed


def orders(seed: int, count: int) -> set[str]:
    """Return the distinct digests of the sums from ``count`` orders of arrival; there should be exactly one.

    Five jobs share the orders; they differ in threads, buckets and transport.
    """
    digests: set[str] = set()
    for job, (threads, reducing, group, mebibytes, shared) in enumerate(
        ((1, 1, 1, -1, 1), (2, 4, -1, 0.05, 1), (3, 2, 3, 0.01, 1), (4, 3, 2, -1, 0), (2, 1, -1, -1, 0))
    ):
        with tempfile.TemporaryDirectory() as folder:
            done = run_ranks(
                Path(folder),
                3,
                ORDERS,
                SEED=str(seed * 10 + job),
                COUNT=str(-(-count // 5)),
                MXNET_CPU_WORKER_NTHREADS=str(threads),
                MXNET_KVSTORE_REDUCTION_NTHREADS=str(reducing),
                MXNET_KVSTORE_BIGARRAY_BOUND="1000",
                FLAGS_fuse_parameter_groups_size=str(group),
                FLAGS_fuse_parameter_memory_size=str(mebibytes),
                WEFTPLAN_KVSTORE_SHARED_MEMORY=str(shared),
            )
        digests |= set(re.findall(r"digest ([0-9a-f]{64})", done.stdout))
    return digests


def main() -> None:
    """Run the trial that the arguments name, print its results, and exit with status 1 on an error."""
    what, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if what == "orders":
        digests = orders(seed, count)
        shown = ", ".join(digest[:16] for digest in sorted(digests))
        print(f"seed {seed}: {count} orders of arrival, {len(digests)} different results: {shown}")
        sys.exit(len(digests) != 1)
    if what == "async":
        told, failed = asynchronous(seed, count)
        print(f"seed {seed}: {count} jobs of dist_async, {told} survivors were told, {failed} jobs went wrong")
        sys.exit(bool(failed or not told))
    with emulated() if what == "hosts" else contextlib.nullcontext() as hosts:
        wrong, hangs, times, right = kills(seed, count, hosts)
    middle = f"{statistics.median(times):.3f}" if times else "none"
    worst = f"{max(times):.3f}" if times else "none"
    print(
        f"seed {seed}: at least {count} processes killed, {right} sums right, {wrong} wrong, {hangs} hangs; recovery "
        f"median {middle} s, longest {worst} s ({len(times)} recoveries)"
    )
    sys.exit(bool(wrong or hangs or not times))


if __name__ == "__main__":
    main()
