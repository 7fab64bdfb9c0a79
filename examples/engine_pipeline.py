"""A pipeline that overlaps reading, copying and computing, without a thread, lock or queue of its own.

    python examples/engine_pipeline.py                     # compares its time with a serial run
    python examples/engine_pipeline.py --trace trace.json  # also writes the trace, and a picture of it to trace.svg

The pipeline reads eight packed files of images with some latency, converts them to floats, and scores them. Two buffers
of each kind alternate. Both the conversion of file 0 and the read of file 2 name the first buffer, so the engine starts
that read as soon as the conversion has finished.
"""

import argparse
import json
import tempfile
import time
import zlib
from html import escape
from pathlib import Path

import numpy as np

import weftplan as mx
from weftplan import engine, profiler

IMAGES, PIXELS, FILES, SLOTS = 600, 1024, 8, 2
LATENCY_S = 0.01
"""Seconds of simulated latency per read, as from a remote store; the files of this example are local."""

# -- the pipeline: three tasks, each on a lane of its own, and the loop that calls them -----------------------------


@engine.task(writes=["packed"], ctx=mx.cpu(1))
def read(path, packed):
    time.sleep(LATENCY_S)
    packed[:] = np.frombuffer(zlib.decompress(path.read_bytes()), np.uint8).reshape(packed.shape)


@engine.task(reads=["packed"], writes=["images"], ctx=mx.cpu(2))
def convert(packed, images):
    np.divide(packed, 255, out=images)


@engine.task(reads=["images", "weights"], writes=["score"], ctx=mx.cpu(0))
def compute(images, weights, score):
    score[0] = np.tanh(images @ weights).mean()


def pipeline(paths, weights):
    """Read, convert and score the files as tasks; return the score of each file."""
    packed = [np.empty((IMAGES, PIXELS), np.uint8) for _ in range(SLOTS)]
    images = [np.empty((IMAGES, PIXELS), np.float32) for _ in range(SLOTS)]
    scores = [np.zeros(1) for _ in paths]
    for i, path in enumerate(paths):
        read(path, packed[i % SLOTS])
        convert(packed[i % SLOTS], images[i % SLOTS])
        compute(images[i % SLOTS], weights, scores[i])
    engine.wait(*scores)
    return np.concatenate(scores)


# -- data, timing, and the picture ------------------------------------------------------------------------------------


def make_files(folder):
    """Write compressed files of noisy images; return their paths."""
    rng = np.random.default_rng(0)
    paths = [folder / f"{i}.z" for i in range(FILES)]
    for path in paths:
        values = np.linspace(0, 255, PIXELS) + rng.normal(0, 9, (IMAGES, PIXELS))
        path.write_bytes(zlib.compress(values.clip(0, 255).astype(np.uint8), 1))
    return paths


def timed(kind, paths, weights):
    """Return (seconds, scores) of one run on a new engine, after a warm-up run."""
    made = engine.create(kind, task_workers=1)  # one thread for each lane
    with engine.using(made):
        pipeline(paths[:2], weights)
        start = time.perf_counter()
        scores = pipeline(paths, weights)
        seconds = time.perf_counter() - start
    made.stop()
    return seconds, scores


def picture(trace):
    """Return the trace as SVG: a row per lane, and a bar per task, coloured by file; time runs to the right."""
    events = json.loads(trace)["traceEvents"]
    lanes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    bars = [e for e in events if e["ph"] == "X" and e["cat"] == "operation" and e["name"] != "WaitForVar"]
    titles = sorted(
        {(lanes[e["pid"]], e["name"]) for e in bars}, key=lambda t: ("read", "convert", "compute").index(t[1])
    )
    first, last = min(e["ts"] for e in bars), max(e["ts"] + e["dur"] for e in bars)
    left, right, row = 150, 820, 44
    scale = (right - left) / (last - first)
    hues = (212, 28, 140, 355, 265, 48, 180, 320)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {row * 3 + 62}" font-family="sans-serif" '
        f'font-size="13" role="img"><title>Trace of the pipeline</title>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, (lane, name) in enumerate(titles):
        top = 14 + place * row
        out.append(f'<text x="12" y="{top + 20}">{escape(name)}, {escape(lane)}</text>')
        for number, e in enumerate(sorted((b for b in bars if b["name"] == name), key=lambda b: b["ts"])):
            x, width = left + (e["ts"] - first) * scale, max(e["dur"] * scale, 1)
            out.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{row - 14}" rx="2" '
                f'fill="hsl({hues[number % len(hues)]} 65% 62%)" stroke="#333" stroke-width=".6">'
                f"<title>{escape(name)} file {number}: {e['dur'] / 1e3:.2f} ms</title></rect>"
            )
            if width > 12:
                out.append(f'<text x="{x + width / 2:.1f}" y="{top + 20}" text-anchor="middle">{number}</text>')
    base = 14 + len(titles) * row
    out.append(f'<path d="M{left} {base}H{right}" stroke="#333"/>')
    for tick in range(5):
        x = left + tick * (right - left) / 4
        out.append(f'<path d="M{x} {base}v5" stroke="#333"/>')
        ms = tick * (last - first) / 4000
        out.append(f'<text x="{x}" y="{base + 20}" text-anchor="middle">{ms:.1f} ms</text>')
    out.append(f'<text x="12" y="{base + 20}">numbers are files</text></svg>')
    return "\n".join(out) + "\n"


def main():
    """Compare a serial run with an overlapped run; with ``--trace`` write a trace and its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the trace to FILE and a picture beside it")
    trace = parser.parse_args().trace
    weights = np.random.default_rng(1).normal(0, 0.05, (PIXELS, 768)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        paths = make_files(Path(folder))
        serial, expected = timed("NaiveEngine", paths, weights)
        overlapped, scores = timed("ThreadedEnginePerDevice", paths, weights)
        assert scores.tobytes() == expected.tobytes()
        print(
            f"one after the other {serial * 1e3:.1f} ms, overlapped {overlapped * 1e3:.1f} ms: "
            f"{serial / overlapped:.2f} times as fast, same bits"
        )
        if trace is not None:
            engine.set_engine(engine.create(task_workers=1))
            pipeline(paths[:2], weights)
            profiler.set_config(filename=trace)
            profiler.set_state("run")
            pipeline(paths, weights)
            profiler.dump()
            trace.with_suffix(".svg").write_text(picture(trace.read_text()))
            print(f"trace: {trace} (open it at ui.perfetto.dev), picture: {trace.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
