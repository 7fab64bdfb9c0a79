"""One step of each recurrent cell, forward and backward, on the gates of one batch.

A forward step reads the input's products with the weights, plus bias, from ``gates``, and overwrites them with the
activated gates. A backward step writes the gradient of the gates before activation to ``d_gates``.

Formulas: Elman 1990 (rnn), Hochreiter and Schmidhuber 1997 (lstm), Sak et al. 2014 (lstm with projection), Cho et al.
2014 in cuDNN's variant, which multiplies by r after the product (gru).
"""

from __future__ import annotations

from typing import Any

from weftplan.ops.core.cuda_gemm import DTYPES, gemm
from weftplan.ops.core.products import matmul
from weftplan.ops.nn.rnn_cuda_cells import fused, gru_back, gru_step, lstm_back, lstm_step
from weftplan.ops.nn.rnn_layout import RnnLayout, SavedValues, Weights
from weftplan.support.array_types import ArrayModule, RawArray


def _sigmoid(xp: ArrayModule, x: RawArray) -> None:
    xp.multiply(x, -1.0, out=x)  # not xp.negative, which NumPy may compute wrongly: see ops/core/kernels.py
    xp.exp(x, out=x)
    xp.add(x, 1.0, out=x)
    xp.divide(1.0, x, out=x)


def _slope_sigmoid(xp: ArrayModule, y: RawArray, target: RawArray, spare: RawArray) -> None:
    """Multiply ``target`` by the slope y · (1 - y) of a sigmoid whose output is ``y``; ``spare`` is scratch."""
    xp.multiply(target, y, out=target)
    xp.subtract(1.0, y, out=spare)
    xp.multiply(target, spare, out=target)


def _slope_tanh(xp: ArrayModule, y: RawArray, target: RawArray, spare: RawArray) -> None:
    """Multiply ``target`` by the slope 1 - y² of a tanh whose output is ``y``; ``spare`` is scratch."""
    xp.multiply(y, y, out=spare)
    xp.subtract(1.0, spare, out=spare)
    xp.multiply(target, spare, out=target)


class Cell:
    """The forward step of one layer and direction, for a batch of states (batch, units).

    Scratch: ``product`` (batch, gates), ``spare`` (batch, state_size).
    """

    def __init__(self, xp: ArrayModule, plan: RnnLayout, weights: Weights, product: RawArray, spare: RawArray) -> None:
        self.xp = xp
        self.plan = plan
        self.weights = weights
        self.product = product
        self.spare = spare

    def step(
        self,
        gates: RawArray,
        state: RawArray,
        cell: RawArray,
        next_state: RawArray,
        next_cell: RawArray,
        hidden: RawArray | None,
    ) -> None:
        """Compute ``next_state`` and, for an lstm, ``next_cell``; activate ``gates`` in place.

        ``next_state`` may be ``state``, and ``next_cell`` may be ``cell``. ``hidden``, unless None, gets the value that
        :class:`SavedValues` describes.
        """
        xp, n = self.xp, self.plan.size
        matmul(xp, state, self.weights.of_state.T, self.product)
        if self.plan.mode == "gru":
            self._gru(gates, state, next_state, hidden)
            return
        if self.plan.mode == "lstm" and not self.plan.projected and fused(xp, gates, cell, next_state, next_cell):
            lstm_step(xp, gates, self.product[: gates.shape[0]], cell, next_cell, next_state)
            return
        xp.add(gates, self.product, out=gates)
        if self.plan.mode == "rnn_relu":
            xp.maximum(gates, 0.0, out=gates)
            xp.copyto(next_state, gates)
        elif self.plan.mode == "rnn_tanh":
            xp.tanh(gates, out=gates)
            xp.copyto(next_state, gates)
        else:
            i, f, g, o = (gates[:, k * n : (k + 1) * n] for k in range(4))
            _sigmoid(xp, gates[:, : 2 * n])
            xp.tanh(g, out=g)
            _sigmoid(xp, o)
            xp.multiply(f, cell, out=next_cell)
            xp.multiply(i, g, out=self.spare)
            xp.add(next_cell, self.spare, out=next_cell)
            if not self.plan.projected:
                xp.tanh(next_cell, out=next_state)
                xp.multiply(next_state, o, out=next_state)
            else:
                hidden = self.spare if hidden is None else hidden
                xp.tanh(next_cell, out=hidden)
                xp.multiply(hidden, o, out=hidden)
                matmul(xp, hidden, self.weights.of_projection.T, next_state)

    def _gru(self, gates: RawArray, state: RawArray, next_state: RawArray, hidden: RawArray | None) -> None:
        xp, n, product = self.xp, self.plan.size, self.product
        bias = self.weights.state_bias
        if fused(xp, gates, product, bias, state, next_state, *(() if hidden is None else (hidden,))):
            gru_step(xp, gates, product, bias, state, next_state, hidden)
            return
        xp.add(product, bias, out=product)
        r_and_z, new, share = gates[:, : 2 * n], gates[:, 2 * n :], product[:, 2 * n :]
        xp.add(r_and_z, product[:, : 2 * n], out=r_and_z)
        _sigmoid(xp, r_and_z)
        if hidden is not None:
            xp.copyto(hidden, share)
        xp.multiply(share, gates[:, :n], out=share)
        xp.add(new, share, out=new)
        xp.tanh(new, out=new)
        xp.subtract(state, new, out=self.spare)
        xp.multiply(self.spare, gates[:, n : 2 * n], out=self.spare)
        xp.add(new, self.spare, out=next_state)


class CellGradient:
    """The backward step of one layer and direction: gradients before the step from gradients after it.

    Scratch: ``product`` (batch, gates), which only gru uses, and ``spare`` (2, batch, state_size).
    """

    def __init__(self, xp: ArrayModule, plan: RnnLayout, weights: Weights, product: RawArray, spare: RawArray) -> None:
        self.xp = xp
        self.plan = plan
        self.weights = weights
        self.product = product
        self.spare = spare

    def step(
        self,
        saved: SavedValues,
        t: int,
        state: RawArray,
        cell: Any,
        d_state: RawArray,
        d_cell: RawArray,
        d_gates: RawArray,
        next_d_state: RawArray,
        next_d_cell: RawArray,
    ) -> None:
        """Compute ``d_gates``, ``next_d_state`` and, for an lstm, ``next_d_cell`` of step ``t``.

        ``state`` and ``cell`` are the values before the step; ``d_state`` and ``d_cell`` are the gradients after it.
        ``next_d_state`` and ``next_d_cell``, the gradients before it, may be ``d_state`` and ``d_cell``.
        """
        xp, plan = self.xp, self.plan
        gates = saved.gates[t]
        if plan.mode == "gru":
            self._gru(gates, saved.hidden[t], state, d_state, d_gates, next_d_state)
            return
        if plan.mode == "rnn_relu":
            xp.greater(gates, 0.0, out=d_gates)
            xp.multiply(d_gates, d_state, out=d_gates)
        elif plan.mode == "rnn_tanh":
            xp.copyto(d_gates, d_state)
            _slope_tanh(xp, gates, d_gates, self.spare[0])
        else:
            self._lstm(gates, saved.cells[t], cell, d_state, d_cell, d_gates, next_d_cell)
        matmul(xp, d_gates, self.weights.of_state, next_d_state)

    def _lstm(
        self,
        gates: RawArray,
        new_cell: RawArray,
        cell: RawArray,
        d_state: RawArray,
        d_cell: RawArray,
        d_gates: RawArray,
        next_d_cell: RawArray,
    ) -> None:
        xp, n = self.xp, self.plan.size
        spare, curve = self.spare
        i, f, g, o = (gates[:, k * n : (k + 1) * n] for k in range(4))
        d_i, d_f, d_g, d_o = (d_gates[:, k * n : (k + 1) * n] for k in range(4))
        if self.plan.projected:
            d_hidden = d_g  # d_g is free until the gates' gradients are computed
            matmul(xp, d_state, self.weights.of_projection, d_hidden)
        else:
            d_hidden = d_state
            if fused(xp, gates, new_cell, cell, d_state, d_cell, d_gates, next_d_cell):
                lstm_back(xp, gates, new_cell, cell, d_state, d_cell, d_gates, next_d_cell)
                return
        xp.tanh(new_cell, out=curve)
        xp.multiply(d_hidden, curve, out=d_o)
        _slope_sigmoid(xp, o, d_o, spare)
        xp.multiply(curve, curve, out=curve)
        xp.subtract(1.0, curve, out=curve)
        xp.multiply(curve, o, out=curve)
        xp.multiply(curve, d_hidden, out=curve)
        xp.add(d_cell, curve, out=curve)  # the whole gradient of the cell
        xp.multiply(curve, g, out=d_i)
        _slope_sigmoid(xp, i, d_i, spare)
        xp.multiply(curve, i, out=d_g)
        _slope_tanh(xp, g, d_g, spare)
        xp.multiply(curve, cell, out=d_f)
        _slope_sigmoid(xp, f, d_f, spare)
        xp.multiply(curve, f, out=next_d_cell)

    def _gru(
        self,
        gates: RawArray,
        share: RawArray,
        state: RawArray,
        d_state: RawArray,
        d_gates: RawArray,
        next_d_state: RawArray,
    ) -> None:
        xp, n, product = self.xp, self.plan.size, self.product
        spare, d_old = self.spare
        if fused(xp, gates, share, d_state, d_gates, product, next_d_state):
            if not state.flags.c_contiguous:  # its rows are part of longer rows if there are two directions
                xp.copyto(spare, state)
                state = spare
            # If cuBLAS is called directly, the product itself adds to next_d_state.
            direct = product.dtype.name in DTYPES
            gru_back(xp, gates, share, state, d_state, d_gates, product, next_d_state if direct else d_old)
            if direct:
                gemm(xp, product, self.weights.of_state, next_d_state, add=True)
            else:
                matmul(xp, product, self.weights.of_state, next_d_state)
                xp.add(next_d_state, d_old, out=next_d_state)
            return
        r, z, new = (gates[:, k * n : (k + 1) * n] for k in range(3))
        d_r, d_z, d_new = (d_gates[:, k * n : (k + 1) * n] for k in range(3))
        xp.subtract(state, new, out=d_z)
        xp.multiply(d_z, d_state, out=d_z)
        _slope_sigmoid(xp, z, d_z, spare)
        xp.multiply(d_state, z, out=d_old)
        xp.subtract(d_state, d_old, out=d_new)
        _slope_tanh(xp, new, d_new, spare)
        xp.multiply(d_new, share, out=d_r)
        _slope_sigmoid(xp, r, d_r, spare)
        xp.copyto(product[:, : 2 * n], d_gates[:, : 2 * n])
        xp.multiply(d_new, r, out=product[:, 2 * n :])
        matmul(xp, product, self.weights.of_state, next_d_state)
        xp.add(next_d_state, d_old, out=next_d_state)
