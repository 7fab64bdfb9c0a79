"""Checkpoints with unpacked weights, one array per gate, readable by other cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weftplan.ndarray import NDArray
from weftplan.rnn.base import BaseRNNCell
from weftplan.symbol import Symbol
from weftplan.training.fit.parameter_files import load_checkpoint, save_checkpoint

Cells = BaseRNNCell | Sequence[BaseRNNCell]


def _cell_list(cells: Cells) -> list[BaseRNNCell]:
    return [cells] if isinstance(cells, BaseRNNCell) else list(cells)


def save_rnn_checkpoint(
    cells: Cells,
    prefix: str,
    epoch: int,
    symbol: Symbol | None,
    arg_params: Mapping[str, NDArray],
    aux_params: Mapping[str, NDArray],
) -> Path:
    """Call ``mx.model.save_checkpoint`` with the weights of ``cells`` unpacked.

    Args:
        cells: a cell or a list of cells.
        prefix: path and start of the files' names.
        epoch: number in the name of the parameter file.
        symbol: the network.
        arg_params: parameters by name.
        aux_params: auxiliary states by name.
    """
    weights = dict(arg_params)
    for cell in _cell_list(cells):
        weights = cell.unpack_weights(weights)
    return save_checkpoint(prefix, epoch, symbol, weights, aux_params)


def load_rnn_checkpoint(cells: Cells, prefix: str, epoch: int) -> tuple[Symbol, dict[str, NDArray], dict[str, NDArray]]:
    """Call ``mx.model.load_checkpoint`` and pack the weights of ``cells``.

    Args:
        cells: a cell or a list of cells.
        prefix: path and start of the files' names.
        epoch: number in the name of the parameter file.
    """
    symbol, weights, aux = load_checkpoint(prefix, epoch)
    for cell in _cell_list(cells):
        weights = cell.pack_weights(weights)
    return symbol, weights, aux


def do_rnn_checkpoint(cells: Cells, prefix: str, period: int = 1) -> Callable[..., None]:
    """Return a callback for the end of an epoch that saves every ``period`` epochs.

    Args:
        cells: a cell or a list of cells.
        prefix: path and start of the files' names.
        period: epochs between two checkpoints.
    """
    every = max(1, int(period))

    def save(
        epoch: int,
        symbol: Symbol | None = None,
        args: Mapping[str, NDArray] | None = None,
        aux: Mapping[str, NDArray] | None = None,
    ) -> None:
        if (epoch + 1) % every == 0:
            save_rnn_checkpoint(cells, prefix, epoch + 1, symbol, args or {}, aux or {})

    return save
