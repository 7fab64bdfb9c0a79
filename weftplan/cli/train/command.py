"""``weftplan train``: training of a real network on real data, through every layer of the library.

The module owns the options and the report of a run; ``tasks.py`` has the networks and data. The command runs on the
main thread, and Ctrl-C ends the run after the current batch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from weftplan import engine, models, profiler, storage
from weftplan.cli.columns import output_width
from weftplan.cli.doctor.devices import parse_devices
from weftplan.cli.model_files import class_names_path
from weftplan.cli.options import (
    budget_option,
    json_option,
    number,
    pixel_options,
    positive,
    writable_folder,
    writable_prefix,
)
from weftplan.cli.train import tasks as train_tasks
from weftplan.cli.train.photos import explain_images, photos
from weftplan.cli.train.report import write_report
from weftplan.cli.train.result import result_lines, result_rows, say_lines, weights_sha256
from weftplan.device.context import Context
from weftplan.engine.registry import registered
from weftplan.errors import FormatError, MXNetError
from weftplan.kvstore import KVStoreBase
from weftplan.kvstore import create as create_store
from weftplan.ndarray import random
from weftplan.support.atomic_files import write_text
from weftplan.support.command_start import INTERRUPTED
from weftplan.support.progress import is_shown
from weftplan.training.fit.callbacks import BatchEndParam, EarlyStopping
from weftplan.training.fit.checkpoint_writer import Checkpoints
from weftplan.training.fit.display import Display
from weftplan.training.fit.events import Events
from weftplan.training.fit.interruption import StopAtBatchEnd
from weftplan.training.initializers.initializer import Xavier
from weftplan.training.module.module import Module

BATCH = 64
"""Default batch size for digits and text."""


def _devices(ctx: click.Context, param: click.Parameter, value: str) -> list[Context]:
    return parse_devices(value)


@click.command("train")
@click.option(
    "--network",
    type=click.Choice(list(dict.fromkeys([*train_tasks.NETWORKS, *models.names()]))),
    metavar="NAME",
    default="lenet",
    show_default=True,
    help="The network to train: mlp, lenet and resnet learn digits, lstm learns text. With --data any built-in "
    "network for images, such as resnet18.",
)
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Train on the images of this folder, which has a sub-folder for each class. A fifth of them, or the "
    "sub-folder val next to train, is for testing.",
)
@click.option(
    "--from",
    "start",
    type=(str, str),
    metavar="PREFIX EPOCH",
    help="Start from this checkpoint, or a model file and a parameter file. With --data its last layer is replaced "
    "if it does not have as many outputs as there are classes.",
)
@click.option("--freeze", is_flag=True, help="Train only the layer that replaces the last one of --from.")
@pixel_options("The size of the images of --data. The default is the size that the network usually takes.")
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
    metavar="KIND",
    type=click.Choice(tuple(registered())),
    default=None,
    help=f"The engine: {', '.join(registered())}. Without this option MXNET_ENGINE_TYPE decides.",
)
@click.option(
    "--kvstore",
    default="device",
    show_default=True,
    type=click.Choice(("local", "device", "dist_sync", "dist_device_sync", "none")),
    help="Where gradients are summed: on the host, on a device, over the processes of `weftplan launch`, or nowhere "
    "(one device).",
)
@number("--epochs", help="The number of passes over the data. The default is 25 for digits and 8 for text.")
@number(
    "--batch-size",
    help="The number of images or lines in a step, over all devices and processes. The default is 64, with --data 32.",
)
@number(
    "--micro-batches",
    default=1,
    help="Cut each batch into this many pieces and sum their gradients, which takes the memory of a piece. "
    "`weftplan plan --batch-max` says how many a budget needs.",
)
@click.option(
    "--mixed-precision",
    type=click.Choice(("float16", "bfloat16")),
    help="Compute products in this dtype. Parameters stay float32, and the loss is scaled with float16.",
)
@number(
    "--seed",
    default=0,
    least=0,
    greatest=2**32 - 1,
    help="The seed of the weights and of the order of samples. The same seed gives the same bits.",
)
@positive("--lr", help="The learning rate. The default is 0.05 with SGD for digits and 0.005 with Adam for text.")
@budget_option("Keep the memory of training within this limit: 2MB, 512KiB, or 80% of the memory.")
@click.option(
    "--report",
    type=click.Path(file_okay=False, path_type=Path),
    callback=writable_folder,
    help="Write a report into this folder: loss, speed, where the time went, memory and queues as a page and as JSON "
    "lines, the plan, and what ran when.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    callback=writable_prefix,
    help="Save checkpoints under this prefix while training runs, and the trained network at its end. Without this "
    "option Ctrl-C saves digits-<network>, text-<network> or photos-<network>.",
)
@number(
    "--every",
    help="The number of steps between two checkpoints. Without this option there is one at the end of each epoch.",
)
@number("--keep", default=3, help="How many of the newest checkpoints stay.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the newest checkpoint, or begin where there is none. The result has the bits of a run that was "
    "not interrupted.",
)
@number(
    "--patience",
    help="Validate after each epoch, and stop when this many epochs in a row bring no improvement. The best one stays "
    "beside the checkpoints.",
)
@json_option("Print the result as one JSON object and nothing else.")
def command(
    network: str,
    data: Path | None,
    start: tuple[str, str] | None,
    freeze: bool,
    mean: list[float] | None,
    std: list[float] | None,
    resize: tuple[int, int] | None,
    devices: list[Context],
    kind: str | None,
    kvstore: str,
    epochs: int | None,
    batch_size: int | None,
    micro_batches: int,
    mixed_precision: str | None,
    seed: int,
    lr: float | None,
    budget: str | None,
    report: Path | None,
    checkpoint: Path | None,
    every: int | None,
    keep: int,
    resume: bool,
    patience: int | None,
    as_json: bool,
) -> None:
    """Train a network on 1,797 real handwritten digits (8x8), lines of real text, or images of your own.

    The engine schedules the training, its memory is planned before the run, and its gradients go through the kvstore.
    Ctrl-C stops it between two batches and saves a checkpoint. A run with --checkpoint and --resume may be killed at
    any moment and goes on when the same command is typed again.
    """
    for name, value in (("--resume", resume), ("--every", every)):
        if value and checkpoint is None:
            raise click.UsageError(f"{name} needs --checkpoint PREFIX, which says where the checkpoints are")
    if data is None:
        options = (("--from", start), ("--freeze", freeze), ("--mean", mean), ("--std", std), ("--resize", resize))
        for name, option in options:
            if option:
                raise click.UsageError(f"{name} needs --data FOLDER, the images to train on")
        if network not in train_tasks.NETWORKS:
            names = ", ".join(train_tasks.NETWORKS)
            raise click.UsageError(f"--network {network} needs --data FOLDER, its images; without it there are {names}")
    if freeze and start is None:
        raise click.UsageError("--freeze needs --from PREFIX EPOCH, the parameters that stay")
    _warn_alone(kvstore)
    if kvstore == "none" and len(devices) > 1:
        raise click.UsageError(
            f"--kvstore none does not exchange gradients, so {len(devices)} devices would train apart: "
            f"use --devices 1, or --kvstore device"
        )
    store = create_store(kvstore) if kvstore != "none" else None
    is_first = store is None or store.rank == 0  # of several processes only the first prints
    say = _say_nothing if as_json or not is_first else say_lines
    chosen = engine.create(kind) if kind is not None else engine.get()
    with engine.using(chosen):
        try:
            wishes = _Wishes(epochs, micro_batches, mixed_precision, checkpoint, every, keep, resume, patience, report)
            settings: dict[str, Any] = {"context": list(devices), "memory_budget": budget}
            seed = _seeded(seed)
            rank, workers = (0, 1) if store is None else (store.rank, store.num_workers)
            if data is not None:
                task = photos(
                    data, network, start, batch_size, seed=seed, rank=rank, workers=workers, lr=lr, mean=mean, std=std,
                    resize=resize, freeze=freeze, settings=settings,
                )  # fmt: skip
                network = task.prefix.removeprefix("photos-")
            else:
                task = train_tasks.make(
                    network, batch_size or BATCH, seed=seed, rank=rank, workers=workers, lr=lr, settings=settings
                )
            result = _run(network, task, devices, store, wishes, say, as_json=as_json and is_first)
        except MXNetError as error:
            text = explain_images(data) if data is not None and isinstance(error, FormatError) else ""
            told = str(error).replace("resume=True", "--resume")
            told = told.replace("pass resume='changed' to let those of now hold", "give another --checkpoint")
            raise click.ClickException(text or told) from error
        finally:
            engine.get().wait_for_all()
    if kind is not None:
        chosen.stop()
    if result.get("interrupted"):
        raise click.exceptions.Exit(INTERRUPTED)


@dataclass(frozen=True, slots=True)
class _Wishes:
    """The options of the run."""

    epochs: int | None
    micro_batches: int
    mixed_precision: str | None
    checkpoint: Path | None
    every: int | None
    keep: int
    resume: bool
    patience: int | None
    report: Path | None


def _warn_alone(kvstore: str) -> None:
    """Warn if each process of a job would train its own network."""
    processes = os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if processes != "1" and not kvstore.startswith("dist") and os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        click.echo(
            f"warning: --kvstore {kvstore} exchanges nothing between the {processes} processes of this job, so each "
            f"trains a network of its own; use --kvstore dist_sync",
            err=True,
        )


def _seeded(seed: int) -> int:
    """Set the seed of all random numbers and return it."""
    random.seed(seed)
    return seed


def _partners(store: KVStoreBase) -> str:
    """Return words for the processes that share the store; empty if the store cannot be shared."""
    if store.num_workers > 1:
        return f" of {store.num_workers} processes"
    return " of this process alone (weftplan launch starts several)" if store.type.startswith("dist") else ""


def _say_nothing(text: str) -> None:
    """Print nothing: another process prints, or JSON is wanted."""


def _run(
    network: str,
    task: train_tasks.TrainingTask,
    devices: list[Context],
    store: KVStoreBase | None,
    wishes: _Wishes,
    say: Callable[[str], None],
    *,
    as_json: bool,
) -> dict[str, Any]:
    """Train, print the result, and only then write files, since a disk may be full."""
    rank, workers = (store.rank, store.num_workers) if store is not None else (0, 1)
    module, epochs = task.module, wishes.epochs or task.epochs
    report = wishes.report if rank == 0 else None
    stop = StopAtBatchEnd()
    display = Display(
        epochs, task.batches, memory=lambda: _memory(devices)[0], silent=say is _say_nothing or not is_shown(True)
    )
    start = time.perf_counter()
    interrupted = False
    events = None if report is None else Events(report, page=False)
    if report is not None and epochs == 1:
        profiler.set_state("run")
    following = [] if report is None else [_Recording(epochs)]
    with stop:
        # A reader of this line may interrupt: from here on Ctrl-C waits for the end of a batch.
        say(
            f"{network} on {', '.join(map(str, devices))}: engine {type(engine.get()).__name__}, kvstore "
            f"{'none' if store is None else store.type + _partners(store)}, {task.described}"
        )
        try:
            module.fit(
                task.train,
                eval_data=None if wishes.patience is None else task.test,
                eval_metric=task.metric,
                kvstore=store if workers > 1 or len(devices) > 1 else None,
                optimizer=task.optimizer,
                optimizer_params=task.optimizer_params,
                progress=display,
                batch_end_callback=[stop, *following],
                epoch_end_callback=[recording.end_epoch for recording in following] or None,
                initializer=Xavier(magnitude=2.24),
                arg_params=None if task.values is None else task.values[0],
                aux_params=None if task.values is None else task.values[1],
                allow_missing=True,
                num_epoch=epochs,
                micro_batches=wishes.micro_batches,
                mixed_precision=wishes.mixed_precision,
                checkpoint=wishes.checkpoint,
                every=wishes.every,
                keep=wishes.keep,
                resume=wishes.resume,
                early_stopping=None if wishes.patience is None else EarlyStopping(patience=wishes.patience),
                report=events,
            )
        except KeyboardInterrupt:
            interrupted = True
    display.clear()
    lanes = ""
    if report is not None:
        profiler.set_state("stop")
        lanes = profiler.to_html(title=f"training {network}: the last epoch")
    engine.get().wait_for_all()
    wall = time.perf_counter() - start
    executors = module.owner().group.executors
    plans = [executor.memory_plan for executor in executors]
    result: dict[str, Any] = {
        "network": network,
        "workers": workers,
        "devices": [str(ctx) for ctx in devices],
        "engine": type(engine.get()).__name__,
        **task.score(),
        f"{task.unit}_per_s": display.samples / wall,
        "wall_s": wall,
        "planned_peak_bytes": sum(plan.peak for plan in plans),
        "unshared_bytes": sum(plan.unshared_bytes for plan in plans),
        "lower_bound_bytes": sum(plan.lower_bound for plan in plans),
        "allocated_bytes": sum(executor.allocated_bytes for executor in executors),
        "weights_sha256": weights_sha256(*module.get_params()),
        "interrupted": interrupted,
        **task.facts,
    }
    rows = result_rows(result)
    say("\n".join(result_lines(rows, output_width())))
    if as_json:
        click.echo(json.dumps(result))
    if rank == 0:
        _save(
            task,
            wishes,
            display.epoch if interrupted else epochs,
            say,
            interrupted=interrupted,
            is_single=workers == 1,
        )
    if events is not None and report is not None:
        write_report(report, network, plans[0], events, lanes, result, rows)
        say(f"report: {report / 'index.html'}")
    return result


def _save(
    task: train_tasks.TrainingTask,
    wishes: _Wishes,
    epoch: int,
    say: Callable[[str], None],
    *,
    interrupted: bool,
    is_single: bool,
) -> None:
    """Save after Ctrl-C the state that a continuation needs, otherwise the trained network."""
    module = task.module
    if interrupted and wishes.checkpoint is not None and is_single:
        newest = Checkpoints(wishes.checkpoint).files()[-1:]
        message = f"saved {newest[0]}" if newest else "no step had ended"
        say(f"interrupted: {message}; type the same command with --resume to go on")
    elif interrupted:
        prefix = wishes.checkpoint or Path(task.prefix)
        if isinstance(module, Module):
            path = module.save_checkpoint(prefix, epoch, save_optimizer_states=module.optimizer_initialized)
            shell = f"weftplan train --data FOLDER --from {prefix} {epoch}, or " if "classes" in task.facts else ""
            say(
                f"interrupted: saved {path}; continue with {shell}mx.mod.Module.load({str(prefix)!r}, {epoch}, "
                f"load_optimizer_states={module.optimizer_initialized})"
            )
        else:
            path = module.owner().save_checkpoint(prefix, epoch)
            say(f"interrupted: saved {path}; with --checkpoint and --resume a run goes on where it was")
    elif wishes.checkpoint is not None:
        say(f"saved {module.owner().save_checkpoint(wishes.checkpoint, epoch)}")
        if "classes" in task.facts:
            write_text(class_names_path(wishes.checkpoint), "".join(f"{name}\n" for name in task.facts["classes"]))
            say(f"use it: weftplan run {wishes.checkpoint} {epoch} --input FOLDER {task.usage}")
    elif "classes" in task.facts:
        say("the network was not saved: --checkpoint PREFIX saves it")


class _Recording:
    """Recorder of the operations from the start of the last epoch on."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    def __call__(self, param: BatchEndParam) -> None:
        """Start after a batch of the last epoch: a resumed run may begin there."""
        if param.epoch == self._epochs - 1 and profiler.state() == "stop":
            profiler.set_state("run")

    def end_epoch(self, epoch: int, *_: object) -> None:
        """Start after the last epoch but one; epochs may differ in their number of batches."""
        if epoch == self._epochs - 2:
            profiler.set_state("run")


def _memory(devices: Sequence[Context]) -> tuple[int, int]:
    """Return (live, peak) bytes requested from the storage of these devices."""
    statistics = [storage.get(ctx).statistics() for ctx in devices]
    return sum(s.requested_bytes for s in statistics), sum(s.peak_requested_bytes for s in statistics)
