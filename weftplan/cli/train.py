"""``weftplan train``: a real network on real images, through every layer.

It owns the options and the report of a run; ``training.module`` trains. It runs on the main thread, on which Ctrl-C
ends the run after the batch at hand.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import weftplan.ops  # noqa: F401 - registers every operator
from weftplan import engine, models, profiler, storage
from weftplan.cli.devices import parse_devices
from weftplan.cli.train_report import write_report
from weftplan.device.context import Context
from weftplan.errors import MXNetError
from weftplan.kvstore import KVStoreBase
from weftplan.kvstore import create as create_store
from weftplan.ndarray import NDArray, random
from weftplan.planner.explain import amount
from weftplan.training.callbacks import BatchEndParam, StopAtBatchEnd
from weftplan.training.datasets import load_digits
from weftplan.training.display import Display
from weftplan.training.initializer import Xavier
from weftplan.training.io import DataIter, NDArrayIter
from weftplan.training.module import Module
from weftplan.training.parts import PartOfBatchIter

ENGINES = ("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice")
NETWORKS = ("mlp", "lenet", "resnet")
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells have it."""


def _devices(ctx: click.Context, param: click.Parameter, value: str) -> list[Context]:
    return parse_devices(value)


def _writable_folder(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Checked before training, not after: make the folder and see that a file can be made in it."""
    if value is None:
        return None
    try:
        value.mkdir(parents=True, exist_ok=True)
        probe = value / ".weftplan-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise click.BadParameter(f"cannot write to {value}: {error.strerror or error}") from error
    return value


def _writable_prefix(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """The same for a prefix of files."""
    if value is not None:
        _writable_folder(ctx, param, value.parent)
    return value


@click.command("train")
@click.option(
    "--network", type=click.Choice(NETWORKS), default="lenet", show_default=True, help="The network to train."
)
@click.option(
    "--devices",
    default="2",
    show_default=True,
    callback=_devices,
    help="The number of CPU contexts, or a list of devices such as gpu0,gpu1 or, simulated, sim0,sim1.",
)
@click.option(
    "--engine",
    "kind",
    type=click.Choice(ENGINES),
    default=None,
    help="The engine. Without this option MXNET_ENGINE_TYPE decides.",
)
@click.option(
    "--kvstore",
    default="device",
    show_default=True,
    type=click.Choice(("local", "device", "dist_sync", "dist_device_sync", "none")),
    help="Where gradients are summed: on the host, on a device, over the processes of `weftplan launch`, or nowhere "
    "(one device).",
)
@click.option(
    "--epochs", default=25, show_default=True, type=click.IntRange(min=1), help="The number of passes over the images."
)
@click.option(
    "--batch-size",
    default=64,
    show_default=True,
    type=click.IntRange(min=1),
    help="The number of images in a step, over all devices and processes.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0, max=2**32 - 1),
    help="The seed of the weights and of the order of images. The same seed gives the same bits.",
)
@click.option(
    "--lr",
    default=0.05,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="The learning rate of SGD.",
)
@click.option(
    "--budget",
    metavar="BYTES",
    help="Keep the memory of training within this limit: 2MB, 512KiB, or 80% of the memory.",
)
@click.option(
    "--report",
    type=click.Path(file_okay=False, path_type=Path),
    callback=_writable_folder,
    help="Write a report into this folder: the plan, the curve of the loss, what ran when, and an index.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    callback=_writable_prefix,
    help="Save a checkpoint under this prefix. After Ctrl-C the default is digits-<network>.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object and nothing else.")
def command(
    network: str,
    devices: list[Context],
    kind: str | None,
    kvstore: str,
    epochs: int,
    batch_size: int,
    seed: int,
    lr: float,
    budget: str | None,
    report: Path | None,
    checkpoint: Path | None,
    as_json: bool,
) -> None:
    """Train a network on 1,797 real handwritten digits (8x8), over several devices.

    The engine schedules the training, its memory is planned before the run, and its gradients go through the kvstore.
    Ctrl-C stops it between two batches and saves a checkpoint.
    """
    if kvstore == "none" and len(devices) > 1:
        raise click.UsageError(
            f"--kvstore none does not exchange gradients, so {len(devices)} devices would train apart: "
            f"use --devices 1, or --kvstore device"
        )
    store = create_store(kvstore) if kvstore != "none" else None
    first = store is None or store.rank == 0  # of several processes only one speaks
    console = Console(stderr=as_json, quiet=as_json or not first)
    chosen = engine.create(kind) if kind is not None else engine.get()
    with engine.using(chosen):
        try:
            result = _run(network, devices, store, epochs, batch_size, seed, lr, budget, report, checkpoint, console)
        except MXNetError as error:
            raise click.ClickException(str(error)) from error
        finally:
            engine.get().wait_for_all()
    if kind is not None:
        chosen.stop()
    if as_json and first:
        click.echo(json.dumps(result))
    if result.get("interrupted"):
        raise click.exceptions.Exit(INTERRUPTED)


def _run(
    network: str,
    devices: list[Context],
    store: KVStoreBase | None,
    epochs: int,
    batch_size: int,
    seed: int,
    lr: float,
    budget: str | None,
    report: Path | None,
    checkpoint: Path | None,
    console: Console,
) -> dict[str, Any]:
    random.seed(seed)
    split = load_digits(seed=seed)
    rank, workers = (store.rank, store.num_workers) if store is not None else (0, 1)
    train: DataIter = NDArrayIter(
        split.train_images, split.train_labels, batch_size, shuffle=True, last_batch_handle="discard"
    )
    if workers > 1:
        train = PartOfBatchIter(train, rank=rank, num_workers=workers)
    test = NDArrayIter(split.test_images, split.test_labels, min(batch_size // workers, len(split.test_labels)))
    module = Module(models.digits(network), context=devices, memory_budget=budget)
    batches = len(split.train_labels) // batch_size
    stop = StopAtBatchEnd()
    display = Display(epochs, batches, memory=lambda: _memory(devices)[0], silent=console.quiet)
    start = time.perf_counter()
    interrupted = False
    curve: list[dict[str, Any]] = []
    if report is not None and epochs == 1:
        profiler.set_state("run")
    following = [] if report is None else [partial(_follow, curve, batches, epochs)]
    with stop:
        # Whoever reads this line may interrupt: from here on Ctrl-C waits for the end of a batch.
        console.print(
            f"{network} on {', '.join(map(str, devices))}: engine {type(engine.get()).__name__}, kvstore "
            f"{store.type if store is not None else 'none'}{f' of {workers} processes' * (workers > 1)}, "
            f"{len(split.train_labels)} training and {len(split.test_labels)} test images",
            highlight=False,
        )
        try:
            module.fit(
                train,
                eval_metric=["acc", "ce"],
                kvstore=store if workers > 1 or len(devices) > 1 else None,
                optimizer="sgd",
                optimizer_params={"learning_rate": lr, "momentum": 0.9, "wd": 1e-4},
                progress=display,
                batch_end_callback=[stop, *following],
                initializer=Xavier(magnitude=2.24),
                num_epoch=epochs,
            )
        except KeyboardInterrupt:
            interrupted = True
    display.clear()
    if rank > 0:
        checkpoint = report = None
    if interrupted and rank == 0:
        prefix = checkpoint or Path(f"digits-{network}")
        path = module.save_checkpoint(prefix, display.epoch, save_optimizer_states=module.optimizer_initialized)
        console.print(
            f"interrupted: saved {path}; continue with mx.mod.Module.load({str(prefix)!r}, {display.epoch}, "
            f"load_optimizer_states={module.optimizer_initialized})"
        )
    elif checkpoint is not None:
        console.print(f"saved {module.save_checkpoint(checkpoint, epochs)}")
    lanes = ""
    if report is not None:
        profiler.set_state("stop")
        lanes = profiler.to_html(title=f"training {network}: the last epoch")
    engine.get().wait_for_all()
    wall = time.perf_counter() - start
    accuracy = dict(module.score(test, "acc"))["accuracy"]
    plans = [executor.memory_plan for executor in module.group.executors]
    result: dict[str, Any] = {
        "network": network,
        "workers": workers,
        "devices": [str(ctx) for ctx in devices],
        "engine": type(engine.get()).__name__,
        "test_accuracy": accuracy,
        "images_per_s": display.samples / wall,
        "wall_s": wall,
        "planned_peak_bytes": sum(plan.peak for plan in plans),
        "unshared_bytes": sum(plan.unshared_bytes for plan in plans),
        "lower_bound_bytes": sum(plan.lower_bound for plan in plans),
        "allocated_bytes": sum(executor.allocated_bytes for executor in module.group.executors),
        "weights_sha256": weights_sha256(*module.get_params()),
        "interrupted": interrupted,
    }
    _print_result(result, console)
    if report is not None:
        write_report(report, network, module.group.executors[0].memory_plan, curve, lanes, result)
        console.print(f"report: {report / 'index.html'}")
    return result


def _follow(curve: list[dict[str, Any]], batches: int, epochs: int, param: BatchEndParam) -> None:
    """Note the metrics of each batch, and record what runs from the beginning of the last epoch on."""
    pairs = [] if param.eval_metric is None else param.eval_metric.get_name_value()
    curve.append({"epoch": param.epoch, "batch": param.nbatch, **dict(pairs)})
    if param.epoch == epochs - 2 and param.nbatch == batches - 1:
        profiler.set_state("run")


def weights_sha256(args: dict[str, NDArray], aux: dict[str, NDArray]) -> str:
    """A digest of names, shapes and bits of all parameters and auxiliary states, in name order."""
    digest = hashlib.sha256()
    for name, value in sorted({**args, **aux}.items()):
        host = value.asnumpy()
        digest.update(f"{name}{host.shape}{host.dtype}".encode())
        digest.update(host.tobytes())
    return digest.hexdigest()


def _memory(devices: Sequence[Context]) -> tuple[int, int]:
    """(live, peak) bytes requested from the storage of these devices."""
    statistics = [storage.get(ctx).statistics() for ctx in devices]
    return sum(s.requested_bytes for s in statistics), sum(s.peak_requested_bytes for s in statistics)


def _print_result(result: dict[str, Any], console: Console) -> None:
    table = Table(title="result", show_header=False)
    table.add_row("test accuracy", f"{result['test_accuracy']:.4f}")
    table.add_row("images/s", f"{result['images_per_s']:,.0f}")
    table.add_row("wall time", f"{result['wall_s']:.1f} s")
    peak, unshared, bound = (result[k] for k in ("planned_peak_bytes", "unshared_bytes", "lower_bound_bytes"))
    table.add_row("planned peak", f"{amount(peak)} ({peak:,} bytes)")
    table.add_row("  without sharing", f"{amount(unshared)} ({unshared / max(peak, 1):.2f} times the plan)")
    table.add_row("  lower bound", f"{amount(bound)} (the plan is {peak / max(bound, 1):.3f} times it)")
    table.add_row("  allocated", f"{result['allocated_bytes']:,} bytes (planned: {peak:,})")
    console.print(table)
    operations = Table("device", "queue", "operations", title="what the engine did")
    for row in engine.get().statistics().queues:
        operations.add_row(str(row.context or "any CPU"), row.queue, f"{row.completed:,}")
    console.print(operations)
