"""Files that a program writes, in child processes: the data is on disk however the program ends.

The program closes nothing. It ends after training, or in a callback of ``fit`` in the second epoch.
"""

import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from weftplan.training.fit.checkpoint_writer import Checkpoints
from weftplan.training.fit.events import read_events

PROGRAM = """
import os, sys
from weftplan.training.fit.events import Events
import weftplan as mx

mx.profiler.set_config(filename="trace.json")
mx.profiler.set_state("run")
mx.storage.record()
writer = mx.recordio.MXIndexedRecordIO("a.idx", "a.rec", "w")
plain = mx.recordio.MXRecordIO("b.rec", "w")
for k in range(3):
    writer.write_idx(k, b"record %d" % k)
    plain.write(b"record %d" % k)
logger = mx.log.get_logger("training", "training.log", level=mx.log.INFO)
slow = mx.nd.ones((300, 300))
for _ in range(20):
    slow = mx.nd.dot(slow, slow) / 300
mx.nd.save("arrays.params", {"slow": slow})
net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc"), name="softmax")
net.save("net.json")
module = mx.mod.Module(net)

def callback(param):
    logger.info("epoch %d, batch %d", param.epoch, param.nbatch)
    if (param.epoch, param.nbatch) == (1, 1):
        module.save_optimizer_states("one.states")
        mx.storage.snapshot().save("memory.pickle")
        mx.storage.snapshot().to_html("memory.html")
        END_IN_FIT

data = mx.io.NDArrayIter(mx.nd.ones((8, 3)), mx.nd.zeros((8,)), 2, label_name="softmax_label")
module.fit(data, num_epoch=2, batch_end_callback=callback, epoch_end_callback=mx.callback.do_checkpoint("epoch"),
           checkpoint="run", every=1, optimizer="adam", kvstore=mx.kv.create("local"),
           report=Events("report", period=0, tensorboard=BOARD))
END_OF_MODULE
"""
BOARD = "board" if importlib.util.find_spec("tensorboardX") else None
"""The folder for TensorBoard; None if its package is absent."""
ENDS = {
    "the end of the module": "pass",
    "an exception": "raise ValueError('on purpose')",
    "sys.exit": "sys.exit(3)",
    "Ctrl-C": "raise KeyboardInterrupt",
    "a reference cycle": "cycle = [writer, plain]; cycle.append(cycle); del writer, plain",
    "a forked child that ends first": "pid = os.fork()\nif not pid: raise SystemExit\nos.waitpid(pid, 0)",
}
PLACES = [("END_OF_MODULE", end) for end in ENDS] + [("END_IN_FIT", end) for end in list(ENDS)[1:4]]


def _indexed(folder: Path) -> None:
    read = mx.recordio.MXIndexedRecordIO(folder / "a.idx", folder / "a.rec", "r")
    assert [read.read_idx(k) for k in range(3)] == [b"record 0", b"record 1", b"record 2"]
    read.close()


def _plain(folder: Path) -> None:
    read = mx.recordio.MXRecordIO(folder / "b.rec", "r")
    assert [read.read() for _ in range(4)] == [b"record 0", b"record 1", b"record 2", None]
    read.close()


def _arrays(folder: Path) -> None:
    assert mx.nd.load(str(folder / "arrays.params"))["slow"].asnumpy()[0, 0] == 1


def _checkpoints(folder: Path) -> None:
    kept = Checkpoints(folder / "run")
    newest = kept.newest()
    assert newest is not None
    assert newest.path == kept.files()[-1] >= kept.path(5)
    assert not list(folder.glob(".*")), "an unfinished file is left"


def _epochs(folder: Path) -> None:
    symbol, arguments, _ = mx.model.load_checkpoint(str(folder / "epoch"), 1)
    assert symbol.tojson() == (folder / "net.json").read_text()
    assert np.isfinite(arguments["fc_weight"].asnumpy()).all()


def _events(folder: Path) -> None:
    kinds = [event["event"] for event in read_events(folder / "report" / "events.jsonl")]
    assert kinds[0] == "begin"
    assert kinds[-1] == "end"
    assert kinds.count("step") >= 5
    assert kinds.count("checkpoint") >= 5


def _board(folder: Path) -> None:
    assert BOARD is None or next((folder / BOARD).iterdir()).read_bytes().count(b"train/accuracy") >= 5


def _trace(folder: Path) -> None:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum("dot" in event["name"] for event in events) >= 20


def _log(folder: Path) -> None:
    assert (folder / "training.log").read_text().splitlines()[:6][-1] == "epoch 1, batch 1"


def _memory(folder: Path) -> None:
    assert pickle.loads((folder / "memory.pickle").read_bytes())["device_traces"]
    assert (folder / "memory.html").read_text().endswith("</html>\n")


def _states(folder: Path) -> None:
    updater = mx.optimizer.get_updater(mx.optimizer.create("adam"))
    updater.set_states((folder / "one.states").read_bytes())
    assert updater.states


CHECKS = {
    "records with an index": _indexed,
    "records": _plain,
    "arrays that are still computed": _arrays,
    "checkpoints of a run": _checkpoints,
    "a checkpoint of an epoch": _epochs,
    "events": _events,
    "the page of events": lambda folder: (folder / "report" / "index.html").read_text().index("</html>"),
    "TensorBoard": _board,
    "the profiler's trace": _trace,
    "a log": _log,
    "memory traces": _memory,
    "optimizer states": _states,
}


@pytest.mark.parametrize(("place", "end"), PLACES)
def test_data_is_on_disk_after_every_end(place: str, end: str, tmp_path: Path):
    """Each file is whole: of records that nothing closed, of training that an exception ended, of a running profile."""
    program = (
        PROGRAM.replace("BOARD", repr(BOARD))
        .replace(place, ENDS[end])
        .replace("END_IN_FIT", "pass")
        .replace("END_OF_MODULE", "pass")
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    said = {"an exception": "ValueError: on purpose", "Ctrl-C": "KeyboardInterrupt"}.get(end)
    assert done.stderr.splitlines()[-1:] == ([] if said is None else [said]), done.stderr
    for writer, check in CHECKS.items():
        try:
            check(tmp_path)
        except Exception as error:
            error.add_note(f"file of: {writer}")
            raise
