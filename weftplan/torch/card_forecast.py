"""Say whether a training step fits a card: the bytes that it will show, and the smallest limit that the step survives.

The step is traced on the CPU, translated by the rows of :mod:`weftplan.torch.card_rules`, and its requests are replayed
through the model of PyTorch's allocator. No card is needed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from weftplan.device.amounts import amount
from weftplan.device.cards import architecture, card_memory, context_range
from weftplan.errors import BudgetError, PlanError
from weftplan.support.keyword_errors import known_keywords
from weftplan.torch.allocator import Allocator, AllocatorSettings
from weftplan.torch.card_rules import CONVOLUTIONS, PRODUCTS, CardFunctions, CardKernels, use_foreach
from weftplan.torch.prediction import PARTS, check_optimizer, check_step, record
from weftplan.torch.reach import reached_tensors
from weftplan.torch.trace import StepTrace

MIB = 1 << 20
STEPS = 32
"""Steps in which the largest batch is searched between a power of two and the next; up to 64 every batch counts."""
LINES = 5
"""Batches that the search finds by a line before it halves the range."""
FEW_CALLS = 3000
"""Calls of a step up to which two steady steps are traced; longer steps are traced once."""


@dataclass(frozen=True)
class Forecast:
    """The answer for one step and one card, in bytes. ``str()`` gives it as text, :meth:`to_json` for programs."""

    card: str
    memory: int
    """Bytes that processes can use on the card."""
    fits: bool | None
    """Whether the step fits; None if that depends on the assumed ranges."""
    parts: dict[str, int]
    """Bytes by part at the allocator's peak: tensors by purpose, scratch, and bytes that the allocator adds."""
    reserved: tuple[int, int]
    """Bytes that the allocator reserves without a limit: with no workspaces of convolutions, and with large."""
    survives: tuple[int, int]
    """The smallest limits of the allocator under which the step runs, for the same two cases."""
    context: tuple[int, int]
    """Range of the bytes outside the allocator: CUDA context, kernels and libraries."""
    largest_batch: int | None = None
    """The largest batch that fits, if the step does not and its arguments have a batch."""
    advice: list[str] = field(default_factory=list)
    """What would make the step fit."""
    uncounted: list[str] = field(default_factory=list)
    """What the forecast leaves out."""

    @property
    def shown(self) -> tuple[int, int]:
        """Range of the bytes that nvidia-smi shows without a limit."""
        return self.reserved[0] + self.context[0], self.reserved[1] + self.context[1]

    @property
    def needed(self) -> tuple[int, int]:
        """Range of the smallest card memory with which the step runs."""
        return self.survives[0] + self.context[0], self.survives[1] + self.context[1]

    def __str__(self) -> str:
        """Return the verdict, the parts, the two figures, the ways to fit, and the memory that is not counted."""
        words = {True: "fits", False: "does not fit", None: "may fit: it depends on what is assumed"}
        lines = [f"{words[self.fits]}: needs {_range(self.needed)} of {amount(self.memory)} on {self.card}"]
        lines += [f"  {name:<14} {amount(n):>12}" for name, n in self.parts.items() if n]
        lines.append(f"  {'CUDA context':<14} {_range(self.context):>12} (assumed for this kind of card)")
        lines.append(f"nvidia-smi will show {_range(self.shown)} (allocator {_range(self.reserved)})")
        lines.append(f"the step survives with a limit of {_range(self.survives)} for the allocator")
        lines += self.advice
        return "\n".join([*lines, *(f"not counted: {what}" for what in self.uncounted)])

    def to_json(self) -> dict[str, Any]:
        """Return all figures as a dictionary of plain values."""
        names = ("card", "memory", "fits", "parts", "reserved", "survives", "context", "shown", "needed")
        return {name: getattr(self, name) for name in (*names, "largest_batch", "advice", "uncounted")}


def _range(ends: tuple[int, int]) -> str:
    """Return a range of bytes as text; equal ends are one amount."""
    low, high = map(amount, ends)
    return low if low == high else f"{low} to {high}"


@known_keywords()
def fits(
    step: Callable[..., Any],
    *args: Any,
    card: str,
    optimizer: torch.optim.Optimizer | None = None,
    conf: str | None = None,
    advise: bool = True,
) -> Forecast:
    """Return whether a training step fits a card, without a card and without running the step.

    Args:
        step: a whole training step, or a function that returns a loss, which is then differentiated.
        args: its arguments. They and the model may be on ``meta``.
        card: a card's name such as ``"RTX 4090"``, or the size of its memory such as ``"24GB"``.
        optimizer: the optimizer, if ``step`` returns a loss: gradients are dropped before, and it steps after.
        conf: settings of the allocator; None: those of the environment variable ``PYTORCH_CUDA_ALLOC_CONF``.
        advise: whether to look for the largest batch and for a budget if the step does not fit.

    Raises:
        PlanError: the card or a setting is unknown, the step fails, reads values, has no backward pass, or cannot be
            copied.

    >>> from torch import nn
    >>> model, x = nn.Linear(1000, 1000), torch.ones(10, 1000)
    >>> fits(lambda x: model(x).sum(), x, card="RTX 4090").fits
    True
    """
    check_step(step)
    check_optimizer(optimizer)
    name, memory = card_memory(card)
    settings = AllocatorSettings.parse(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") if conf is None else conf)
    context = context_range(name)
    if context[0] >= memory:
        raise PlanError(
            f"{name} has {amount(memory)}, and the CUDA context alone takes {_range(context)}: give the card's memory "
            f"with its unit, such as 8GB"
        )
    whole = _Whole(step, optimizer)
    kernels, trace, recurrent = _traced(whole, args)
    cublas = (32 * MIB) if architecture(name) in ("hopper", "blackwell") else 8 * MIB + 128 * 1024
    asked = [requests(trace, cublas=cublas, convolutions=c) for c in (False, True)]
    if asked[0] == asked[1]:  # no convolutions
        del asked[1]
    runs = [replay(each, settings) for each in asked]
    limits = [_smallest(each, settings, run) for each, run in zip(asked, runs, strict=True)]
    reserved = (runs[0].peak_reserved, max(run.peak_reserved for run in runs))
    survives = (limits[0], max(limits))
    verdict = True if survives[1] + context[1] <= memory else False if survives[0] + context[0] > memory else None
    uncounted = [f"{operator} ({count} calls): its scratch on a card" for operator, count in kernels.unseen.items()]
    uncounted += [f"torch.{name}: the reserve of cuDNN's kernel" for name in sorted(recurrent)]
    uncounted += ["other processes on the card, side streams, NCCL's buffers, CUDA graphs"]
    batch, advice = None, list[str]()
    if verdict is not True and advise:
        room = memory - context[1]
        with suppress(PlanError):  # a step that holds its batch outside its arguments
            batch = _largest_batch(whole, args, settings, cublas, room, survives[1])
        if batch is not None:
            advice.append(f"the largest batch that fits: {batch}" if batch else "no batch fits: not even one sample")
        advice += _budget(step, args, optimizer, room)
    return Forecast(
        card=name,
        memory=memory,
        fits=verdict,
        parts=_parts(trace, runs[0], cublas),
        reserved=reserved,
        survives=survives,
        context=context,
        largest_batch=batch,
        advice=advice,
        uncounted=uncounted,
    )


@dataclass(frozen=True)
class _Whole:
    """A whole step: the caller's function, the backward pass that it leaves out, and the optimizer's update."""

    function: Callable[..., Any]
    optimizer: torch.optim.Optimizer | None

    def __call__(self, *args: Any) -> None:
        """Run the step."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        out = self.function(*args)
        # A step that differentiates its loss has released the graph; only a fresh loss can be differentiated.
        if isinstance(out, torch.Tensor) and out.requires_grad:
            try:
                (out if out.dim() == 0 else out.sum()).backward()
            except RuntimeError as error:
                if self.optimizer is not None or "a second time" not in str(error):
                    raise
        del out
        if self.optimizer is not None:
            self.optimizer.step()


def _traced(whole: _Whole, args: Any) -> tuple[CardKernels, StepTrace, set[str]]:
    """Return the kernels that were seen, the trace of a few steps, and the recurrent functions."""
    kernels, functions = CardKernels(), CardFunctions()
    options: dict[str, Any] = {"kernels": kernels, "prepare": use_foreach}
    trace = record(whole, args, functions=functions.translated(), **options)
    if not any(call.backward for call in trace.calls):
        raise PlanError("the step has no backward pass: return the loss, or call backward() in the step")
    if len(trace.calls) - trace.start <= FEW_CALLS:
        kernels.unseen.clear()
        trace = record(whole, args, functions=functions.translated(), repeats=2, **options)
    return kernels, trace, functions.seen


def requests(trace: StepTrace, *, cublas: int, convolutions: bool) -> list[tuple[int, int]]:
    """Return the requests of a trace in order: (block, bytes) allocates a block, and (block, -1) frees it.

    Args:
        trace: the calls and storages.
        cublas: bytes of the workspace of a thread that multiplies matrices.
        convolutions: whether convolutions take a workspace of twice the bytes of their operands.
    """
    spans, block = trace.spans(), list(range(len(trace.nbytes)))
    replacements = trace.replacements()
    for _, old, new in replacements:
        block[new] = block[old]
    replaced, written = {new for _, _, new in replacements}, {old for _, old, _ in replacements}
    born: list[list[int]] = [[] for _ in range(len(trace.calls) + 1)]
    dead: list[list[int]] = [[] for _ in range(len(trace.calls) + 2)]
    out: list[tuple[int, int]] = []
    for r, (first, last) in enumerate(spans):
        if r in trace.on_host:
            continue
        if trace.born[r] < 0:
            out.append((r, trace.nbytes[r]))
        elif r not in replaced:
            born[first].append(r)
        if r not in written:
            dead[max(last, first + 1) if trace.born[r] >= 0 else last].append(block[r])
    threads, scratch = set[bool](), len(block)
    for k, call in enumerate(trace.calls):
        out += [(r, -1) for r in dead[k]]
        operator = call.name.split(".")[1] if "." in call.name else call.name
        if call.backward not in threads and operator in PRODUCTS:
            threads.add(call.backward)
            out.append((-len(threads), cublas))
        out += [(r, trace.nbytes[r]) for r in born[k]]
        operands = 2 * sum(trace.nbytes[r] for r in {*call.reads, *call.makes}) if call.name in CONVOLUTIONS else 0
        if inside := call.scratch + (operands if convolutions else 0):
            out += [(scratch, inside), (scratch, -1)]
    return out


def replay(asked: list[tuple[int, int]], settings: AllocatorSettings, limit: int | None = None) -> Allocator:
    """Return the allocator after all requests; ``limit`` is the number of bytes that may be reserved.

    Raises:
        BudgetError: the limit is too small.
    """
    allocator, blocks = Allocator(limit, settings), dict[int, Any]()
    for block, nbytes in asked:
        if nbytes < 0:
            allocator.free(blocks.pop(block))
        else:
            blocks[block] = allocator.allocate(nbytes)
    return allocator


def _smallest(asked: list[tuple[int, int]], settings: AllocatorSettings, free: Allocator) -> int:
    """Return the smallest limit, in steps of 2 MiB, under which requests succeed; ``free`` ran without a limit."""
    low, high = free.peak_allocated // (2 * MIB), -(-free.peak_reserved // (2 * MIB))
    while low < high:
        middle = (low + high) // 2
        try:
            replay(asked, settings, middle * 2 * MIB)
        except BudgetError:
            low = middle + 1
        else:
            high = middle
    return high * 2 * MIB


def _parts(trace: StepTrace, run: Allocator, cublas: int) -> dict[str, int]:
    """Return the bytes by part at the peak of a trace's tensors, and bytes that the allocator adds."""
    live = trace.live()
    at = trace.start + max(range(len(live)), key=live.__getitem__)
    parts = dict.fromkeys(PARTS, 0)
    for r, (first, last) in enumerate(trace.spans()):
        if first <= at < last and r not in trace.on_host:
            parts[trace.purposes[r] or ("inputs" if trace.born[r] < trace.start else "activations")] += trace.nbytes[r]
    threads = {c.backward for c in trace.calls if "." in c.name and c.name.split(".")[1] in PRODUCTS}
    parts["scratch"] = trace.calls[at].scratch + cublas * len(threads)
    parts["allocator"] = max(0, run.peak_reserved - sum(parts.values()))
    return parts


def _batched(args: Any) -> int | None:
    """Return the size of the first dimension that all tensors among the arguments share; None without one."""
    sizes = {t.shape[0] for t in args if isinstance(t, torch.Tensor) and t.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def _with_batch(args: Any, batch: int) -> Iterator[Any]:
    for t in args:
        tensor = isinstance(t, torch.Tensor) and t.dim()
        yield t.new_empty((batch, *t.shape[1:]), requires_grad=t.requires_grad) if tensor else t


def _largest_batch(
    whole: _Whole, args: Any, settings: AllocatorSettings, cublas: int, room: int, known: int
) -> int | None:
    """Return the largest batch whose step survives in ``room`` bytes; 0: none; None: the arguments have no batch.

    Only the batches of :func:`_batch_of` are tried, so that the answer does not depend on the batch that was asked.
    """
    batch = _batched(args)
    if batch is None:
        return None

    def excess(size: int) -> int:
        trace = _traced(whole, tuple(_with_batch(args, size)))[1]
        asked = requests(trace, cublas=cublas, convolutions=True)
        return _smallest(asked, settings, replay(asked, settings)) - room

    # Batch number `low` fits or is 0, and `high` does not fit. Bytes are nearly linear in the batch, so the next number
    # is that at which the line through both meets the room; a few such tries bracket the answer, else halves do.
    low, high, spare, lack = 0, _number_of(batch - 1) + 1, room, known - room
    for k in itertools.count():
        if high - low <= 1 or room <= 0:
            return _batch_of(low)
        a, b = _batch_of(low), _batch_of(high)
        middle = _number_of(a + (b - a) * spare // (spare + lack)) if k < LINES else (low + high) // 2
        middle = min(max(middle, low + 1), high - 1)
        more = excess(_batch_of(middle))
        low, high, spare, lack = (middle, high, -more, lack) if more <= 0 else (low, middle, spare, more)
    raise AssertionError("unreachable")


def _batch_of(number: int) -> int:
    """Return a batch by its number: all up to 64, then 32 between a power of two and the next.

    >>> [_batch_of(number) for number in (1, 64, 65, 96, 97)]
    [1, 64, 66, 128, 132]
    """
    return number if number < 2 * STEPS else (STEPS + number % STEPS) << (number // STEPS - 1)


def _number_of(batch: int) -> int:
    """Return the number of the largest batch of :func:`_batch_of` that is at most ``batch``.

    >>> all(_number_of(_batch_of(number)) == number for number in range(500)), _number_of(127)
    (True, 95)
    """
    shift = max(0, batch.bit_length() - STEPS.bit_length())
    return STEPS * shift + (batch >> shift)


def _budget(step: Any, args: Any, optimizer: torch.optim.Optimizer | None, room: int) -> list[str]:
    """Return a sentence with the budget that makes the batch fit and its time; nothing if there is none."""
    if room <= 0:
        return []
    if optimizer is None:
        return ["pass the loss function and optimizer= to hear which budget makes this batch fit"]
    if any(t.is_meta for t in reached_tensors(step, args)):
        return ["build the model outside 'meta' to hear which budget makes this batch fit"]
    from weftplan.torch.trade_off import planned

    try:
        plan = planned(step, args, budget=room, optimizer=optimizer, workspaces="cached")[1]
    except BudgetError as error:
        return [f"no budget makes this batch fit: the smallest is {amount(error.smallest or 0)}"]
    except PlanError as error:
        return [f"a budget cannot be planned: {str(error).splitlines()[0]}"]
    return [
        f'budget(loss, "{plan.peak}") makes this batch fit, with {100 * plan.more_time:.1f} % more modelled time; the '
        f"plan counts tensors, so leave room for the allocator"
    ]
