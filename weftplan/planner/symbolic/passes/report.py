"""The passes that a symbol goes through on its way to a plan, with what each changed and what switches it off.

Functions of counts and graphs; nothing is kept, and any thread may call them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weftplan.device.amounts import amount, counted
from weftplan.planner.inplace import Kind
from weftplan.planner.labels import Pass
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.symbol.node import FOLDED, Node

_FUSION = "MXNET_USE_FUSION"


def folded(order: Iterable[Node]) -> list[Pass]:
    """What was folded into the given graph before; nothing where nobody did that."""
    values = [node for node in order if FOLDED in node.attrs]
    constants, layers = (sum(node.is_variable == wanted for node in values) for wanted in (True, False))
    found = []
    if constants:
        changed = f"{counted(constants, 'result')} of parameters alone became parameters"
        found.append(Pass("constants folded", changed, "convert.fold_constants"))
    if layers:
        changed = f"{counted(layers, 'node')} became part of the layers before them"
        found.append(Pass("batch norm folded", changed, "convert.fold_batch_norm"))
    return found


def merged(count: int) -> Pass:
    """So many nodes were merged."""
    changed = f"merged {counted(count, 'node')} into others that compute the same" if count else ""
    return Pass("equal expressions merged", changed, "MXNET_ELIMINATE_COMMON_EXPR")


def joined_layers(count: int) -> Pass:
    """So many pairs became one node."""
    changed = f"joined {counted(count, 'pair')} of nodes that follow one another" if count else ""
    return Pass("layers joined", changed, _FUSION)


def depthwise_blocks(count: int) -> Pass:
    """So many depthwise convolutions became one node with the batch norms around them, and so did their gradients."""
    changed = f"joined {counted(count, 'depthwise convolution')} with the batch norms around" if count else ""
    return Pass("depthwise blocks joined", changed, _FUSION)


def gathered_gradients(count: int) -> Pass:
    """The gradients of so many layers were gathered in fewer nodes."""
    changed = f"gathered gradients of {counted(count, 'layer')} with shared weights" if count else ""
    return Pass("shared gradients gathered", changed, _FUSION)


def dropped(memory: MemoryPlan, nbytes: Sequence[int]) -> Pass:
    """What nobody reads in a plan whose entries have these sizes."""
    dead = ((memory.entry_kind == int(Kind.UNUSED)) & (memory.entry_storage < 0)).nonzero()[0].tolist()
    size = sum(nbytes[e] for e in dead)
    changed = f"left out {counted(len(dead), 'output')} that nobody reads: {amount(size)}" if len(dead) else ""
    return Pass("dead outputs dropped", changed, "WEFTPLAN_DROP_DEAD_OUTPUTS")


def notes_of(passes: Iterable[Pass]) -> list[str]:
    """What changed nodes, for readers of a plan's notes."""
    return [f"{one.changed} ({one.switch})" for one in passes if one.changed]
