"""Training that is killed (SIGKILL) at random moments and resumed must end with the bits of an undisturbed run.

    python -m tests.stress.kill_points SEED COUNT

COUNT processes are killed, up to four per run, each at a random moment within the duration of an undisturbed run. A
kill may thus come in a step, in a checkpoint write, or between them. Runs differ in iterators, devices and
micro-batches. Each process is forked from the main process, which never starts an engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import weftplan as mx
from weftplan.training.fit.checkpoint_writer import Checkpoints

EPOCHS = 3
KINDS = ("plain", "prefetching", "of one's own", "two devices", "micro-batches", "buckets")


class Own(mx.io.DataIter):
    """A user's iterator, which cannot report its position."""

    def __init__(self, source: Any) -> None:
        super().__init__(source.batch_size)
        self._source = source
        self.provide_data, self.provide_label = source.provide_data, source.provide_label

    def reset(self) -> None:
        self._source.reset()

    def next(self) -> Any:
        return self._source.next()


def network() -> Any:
    """Return a network with moving statistics and random numbers in every step."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="fc1")
    net = mx.sym.BatchNorm(net, fix_gamma=False, name="bn")
    net = mx.sym.Dropout(mx.sym.Activation(net, act_type="relu", name="act"), p=0.3, name="drop")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3, name="fc2"), name="softmax")


def of_length(length: int) -> Any:
    """Return the network of a bucket, with its data and label names."""
    net = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=9, output_dim=6, name="embed")
    net = mx.sym.Dropout(mx.sym.Reshape(net, shape=(-1, 6)), p=0.2, name="drop")
    net = mx.sym.FullyConnected(net, num_hidden=9, name="fc")
    label = mx.sym.Reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
    return mx.sym.SoftmaxOutput(net, label, name="softmax"), ("data",), ("softmax_label",)


def train(kind: str, prefix: Path, result: Path) -> None:
    """Train or resume, then write a digest of the weights, the last metrics and a random number to ``result``."""
    mx.random.seed(11)
    rng = np.random.default_rng(5)
    metric = ["acc", "ce"]
    if kind == "buckets":
        sentences = [list(rng.integers(1, 9, length)) for length in (4, 7) for _ in range(32)]
        data: Any = mx.rnn.BucketSentenceIter(sentences, 8, buckets=[4, 7], invalid_label=0)
        module: Any = mx.mod.BucketingModule(of_length, data.default_bucket_key)
        metric = [mx.metric.Perplexity(0)]
    else:
        data = mx.io.NDArrayIter(rng.random((64, 10)), rng.integers(0, 3, 64), batch_size=8, shuffle=True)
        contexts = [mx.cpu(0), mx.cpu(1)] if kind == "two devices" else mx.cpu()
        module = mx.mod.Module(network(), context=contexts)
    if kind == "prefetching":
        data = mx.io.PrefetchingIter(data)
    elif kind == "of one's own":
        data = Own(data)
    seen: list[Any] = []
    module.fit(
        data,
        num_epoch=EPOCHS,
        eval_metric=metric,
        kvstore="device",
        optimizer="adam",
        optimizer_params={"learning_rate": 0.01},
        initializer=mx.init.Xavier(),
        batch_end_callback=lambda param: seen.append(param.eval_metric.get_name_value()),
        micro_batches=2 if kind == "micro-batches" else 1,
        checkpoint=prefix,
        every=2,
        keep=2,
        resume=True,
    )
    digest = hashlib.sha256()
    for values in module.get_params():
        for name, value in sorted(values.items()):
            digest.update(name.encode() + value.asnumpy().tobytes())
    if not seen:  # killed after the last batch: only the weights can be compared
        seen.append(None)
    result.write_text(json.dumps([digest.hexdigest(), seen[-1], mx.nd.random.uniform().asscalar().item()]))


def forked(work: Callable[[], None]) -> int:
    """Fork a process that runs ``work`` and exits; return its process identifier."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # skips the exit handlers of the forked process


def kill_points(seed: int, count: int, kinds: tuple[str, ...] = KINDS) -> list[str]:
    """Kill ``count`` processes; return a line per run that ended differently or left files."""
    rng, wrong = random.Random(seed), []
    expected: dict[str, tuple[Any, float]] = {}
    killed = runs = 0
    while killed < count:
        kind = kinds[runs % len(kinds)]
        with tempfile.TemporaryDirectory(prefix="weftplan-kill-") as folder:
            if kind not in expected:
                start, result = time.monotonic(), Path(folder) / "whole.json"
                _, status = os.waitpid(forked(partial(train, kind, Path(folder) / "whole", result)), 0)
                if status:
                    return [f"{kind}: the undisturbed run failed with status {status}"]
                expected[kind] = json.loads(result.read_text()), time.monotonic() - start
            whole, seconds = expected[kind]
            prefix, result, moments = Path(folder) / "run", Path(folder) / "result.json", []
            most = rng.randint(1, 4)
            while not result.exists():
                child = forked(partial(train, kind, prefix, result))
                if killed < count and len(moments) < most:
                    moments.append(round(rng.uniform(0.0, seconds), 4))
                    time.sleep(moments[-1])
                    os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                if os.WIFSIGNALED(status):
                    killed += 1
                elif status:
                    wrong.append(f"{kind}, killed after {moments} s: the resumed run failed with status {status}")
                    break
            if result.exists():
                digest = json.loads(result.read_text())
                if digest[0] != whole[0] or digest[2] != whole[2] or digest[1] not in (None, whole[1]):
                    wrong.append(f"{kind}, killed after {moments} s: {digest} instead of {whole}")
            left = [path.name for path in Path(folder).glob(".*")]
            if len(Checkpoints(prefix, keep=2).files()) > 2 or left:
                wrong.append(f"{kind}, killed after {moments} s: files are left: {left}")
            runs += 1
    print(f"seed {seed}: {killed} processes killed in {runs} runs, {len(wrong)} of which ended differently")
    return wrong


if __name__ == "__main__":
    errors = kill_points(int(sys.argv[1]), int(sys.argv[2]))
    print("\n".join(errors))
    sys.exit(bool(errors))
