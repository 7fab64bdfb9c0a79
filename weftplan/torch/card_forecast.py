"""Say whether a training step fits a card: the bytes that it will show, and the smallest limit that the step survives.

The step is traced on the CPU, translated by the rows of :mod:`weftplan.torch.card_rules`, and its requests are replayed
through the model of PyTorch's allocator. No card is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from weftplan.device.amounts import amount, bytes_of
from weftplan.device.cards import CARDS, CHECKED
from weftplan.errors import BudgetError, PlanError, did_you_mean
from weftplan.support.keyword_errors import known_keywords
from weftplan.torch.allocator import Allocator, Settings
from weftplan.torch.card_rules import CONVOLUTIONS, PRODUCTS, CardFunctions, CardKernels, use_foreach
from weftplan.torch.optimizers import check_optimizer
from weftplan.torch.prediction import PARTS, check_step, record
from weftplan.torch.reach import reached_tensors
from weftplan.torch.trace import Trace

GIB, MIB = 1 << 30, 1 << 20
ARCHITECTURES = {
    "volta": (("V100",), (300, 1000)),
    "turing": (("T4", "RTX 20"), (300, 1000)),
    "ampere": (("A10", "A100", "RTX 30"), (360, 1440)),
    "ada": (("L4", "L40S", "RTX 40"), (360, 640)),
    "hopper": (("H100", "H200"), (420, 640)),
    "blackwell": (("RTX 50", "B200"), (420, 760)),
}
"""Prefixes of cards, and the MiB that a process takes on the card outside PyTorch's allocator: CUDA context, loaded
kernels and libraries. Sources: 300 to 400 MiB with lazy loading, above 1,000 MiB without, before
CUDA 11.7 (PyTorch's tracker, numbers 107667 and 109888); 426 MiB on an RTX 6000 Ada (unsloth-zoo, number 1053, with
PyTorch 2.10); about 1,430 MiB on an A100 (records of GPUMemNet, fitted). An end without a record is that of the next
older kind."""
TRIES = 6
"""Traces of other batches until the largest that was found to fit is the answer."""
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
    settings = Settings.parse(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") if conf is None else conf)
    context = _context(name, memory)
    if context[0] >= memory:
        raise PlanError(f"{name} has {amount(memory)}, and the CUDA context alone takes {_range(context)}")
    whole = _Whole(step, optimizer)
    kernels, trace, recurrent = _traced(whole, args)
    cublas = (32 * MIB) if _architecture(name) in ("hopper", "blackwell") else 8 * MIB + 128 * 1024
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


def card_memory(card: str) -> tuple[str, int]:
    """Return a card's name and the bytes of its memory; raise PlanError with the nearest names if it is unknown."""
    names = {name.lower(): name for name in CARDS}
    name = names.get(" ".join(card.lower().split()))
    if name is not None:
        return name, CARDS[name] * GIB - (CARDS[name] * GIB // 16 if name in CHECKED else 0)
    try:
        return f"a card of {card.strip()}", bytes_of(card.upper().replace("GIB", "GB").replace("GB", "GiB"))
    except PlanError:
        hint = did_you_mean(card.upper(), CARDS)
        raise PlanError(
            f"no card {card!r} is known; {hint}give its memory, such as 8GB, or one of {', '.join(CARDS)}"
        ) from None


def _architecture(card: str) -> str | None:
    """Return the architecture of a card, whose longest prefix in the table decides; None for a size of memory."""
    found = [(len(p), arch) for arch, (prefixes, _) in ARCHITECTURES.items() for p in prefixes if card.startswith(p)]
    return max(found)[1] if found else None


def _context(card: str, memory: int) -> tuple[int, int]:
    """Return the range of bytes outside the allocator; that of all architectures for an unknown one."""
    ranges = [ends for arch, (_, ends) in ARCHITECTURES.items() if _architecture(card) in (arch, None)]
    return min(low for low, _ in ranges) * MIB, max(high for _, high in ranges) * MIB


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
            with suppress(RuntimeError) if self.optimizer is None else nullcontext():
                (out if out.dim() == 0 else out.sum()).backward()
        del out
        if self.optimizer is not None:
            self.optimizer.step()


def _traced(whole: _Whole, args: Any) -> tuple[CardKernels, Trace, set[str]]:
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


def requests(trace: Trace, *, cublas: int, convolutions: bool) -> list[tuple[int, int]]:
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


def replay(asked: list[tuple[int, int]], settings: Settings, limit: int | None = None) -> Allocator:
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


def _smallest(asked: list[tuple[int, int]], settings: Settings, free: Allocator) -> int:
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


def _parts(trace: Trace, run: Allocator, cublas: int) -> dict[str, int]:
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


def _largest_batch(whole: _Whole, args: Any, settings: Settings, cublas: int, room: int, known: int) -> int | None:
    """Return the largest batch whose step survives in ``room`` bytes; 0: none; None: the arguments have no batch."""
    batch = _batched(args)
    if batch is None:
        return None
    needs: dict[int, int] = {0: 0, batch: known}

    def need(size: int) -> int:
        if size not in needs:
            trace = _traced(whole, tuple(_with_batch(args, size)))[1]
            asked = requests(trace, cublas=cublas, convolutions=True)
            needs[size] = _smallest(asked, settings, replay(asked, settings))
        return needs[size]

    if known <= room:
        return batch
    low, high, tries = 0, batch, 0
    while high - low > 1 and tries < TRIES:
        tries += 1
        # Bytes are nearly linear in the batch: try where the line through two known sizes meets the room.
        a, b = (low if low else max(n for n in needs if n < high), high)
        guess = (low + high) // 2
        if a:
            guess = a + int((room - needs[a]) * (b - a) / max(1, needs[b] - needs[a]))
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if need(guess) <= room else (low, guess)
    return low


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
