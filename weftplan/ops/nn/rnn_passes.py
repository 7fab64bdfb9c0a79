"""The RNN operator's passes over a sequence: one layer, one direction, forward and backward in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weftplan.ops.core import tiling
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.products import matmul, product
from weftplan.ops.core.schema import DType, Shape, Workspace
from weftplan.ops.nn.rnn_cells import Cell, CellGradient
from weftplan.ops.nn.rnn_layout import RnnLayout, SavedValues, Weights
from weftplan.support.array_types import RawArray


def span(plan: RnnLayout) -> int:
    """Return the number of steps whose inputs are multiplied by the input's weights in one product."""
    return max(1, min(plan.steps, 8 * tiling.block() // (plan.batch * plan.gates)))


def forward_scratch(plan: RnnLayout, dtype: DType) -> list[tuple[Shape, DType]]:
    """Return the (shape, dtype) of each scratch array of :class:`ForwardPass`."""
    n = plan.batch
    shapes: list[Shape] = [
        (span(plan), n, plan.gates),
        (n, plan.gates),
        (n, plan.size),
        (n, plan.units),
        (n, plan.size),
    ]
    if plan.lengths:
        shapes += [(n, plan.units), (n, plan.size)]
    return [(shape, dtype) for shape in shapes]


class ForwardPass:
    """A forward pass over a sequence; every layer and direction uses the same scratch."""

    def __init__(self, ctx: Workspace, plan: RnnLayout, dtype: DType) -> None:
        self.xp = ctx.xp
        self.plan = plan
        self.gates, self.product, self.spare, self.state, self.cell, *buffers = (
            ctx.take(*spec) for spec in forward_scratch(plan, dtype)
        )
        self.following = tuple(buffers) if plan.lengths else (self.state, self.cell)

    def _spans(self, reverse: bool) -> Iterator[range]:
        """Yield ranges of at most :func:`span` steps, in the order of the pass."""
        count = self.plan.steps
        width = span(self.plan)
        for start in range(0, count, width):
            stop = min(start + width, count)
            yield range(count - 1 - start, count - 1 - stop, -1) if reverse else range(start, stop)

    def run(
        self,
        x: RawArray,
        weights: Weights,
        state: RawArray,
        cell: RawArray | None,
        out: RawArray | None,
        saved: SavedValues | None,
        reverse: bool,
        active: RawArray | None,
    ) -> None:
        """Run all steps, and leave the last state and cell in :attr:`state` and :attr:`cell`.

        ``state`` and ``cell`` (lstm only) are the initial values. ``out`` (steps, batch, units), unless None, gets the
        state after each step, or 0 for samples that are not active. ``active`` (steps, batch, 1) flags the samples that
        are active at each step; None: all samples.
        """
        xp, plan = self.xp, self.plan
        xp.copyto(self.state, state)
        if cell is not None:
            xp.copyto(self.cell, cell)
        cell_step = Cell(xp, plan, weights, self.product, self.spare)
        next_state, next_cell = self.following
        for steps in self._spans(reverse):
            low, high = min(steps), max(steps) + 1
            gates = self.gates[: high - low] if saved is None else saved.gates[low:high]
            rows = gates.reshape(-1, plan.gates)
            product(xp, x[low:high].reshape(rows.shape[0], -1), weights.of_input.T, rows)
            xp.add(rows, weights.input_bias, out=rows)
            if plan.mode != "gru":
                xp.add(rows, weights.state_bias, out=rows)
            for t in steps:
                hidden = None if saved is None or saved.hidden is None else saved.hidden[t]
                cell_step.step(gates[t - low], self.state, self.cell, next_state, next_cell, hidden)
                if active is not None:
                    xp.copyto(self.state, next_state, where=active[t])
                    xp.copyto(self.cell, next_cell, where=active[t])
                if out is not None:
                    if active is None:
                        xp.copyto(out[t], self.state)
                    else:
                        xp.multiply(self.state, active[t], out=out[t])
                if saved is not None:
                    if saved.cells is not None:
                        xp.copyto(saved.cells[t], self.cell)
                    if saved.states is not None:
                        xp.copyto(saved.states[t], self.state)


def backward_scratch(plan: RnnLayout, dtype: DType) -> list[tuple[Shape, DType]]:
    """Return the (shape, dtype) of each scratch array of :class:`BackwardPass`."""
    n = plan.batch
    widest = max(plan.fan_in(layer) for layer in range(plan.layers))
    shapes: list[Shape] = [
        (plan.steps, n, plan.gates),
        (n, plan.gates),
        (2, n, plan.size),
        (n, plan.units),
        (n, plan.size),
        (n, plan.units),
        (n, plan.size),
        (plan.gates, plan.units),
        (span(plan), n, widest if plan.directions == 2 else 1),
    ]
    if plan.projected:
        shapes.append((plan.units, plan.size))
    return [(shape, dtype) for shape in shapes]


class BackwardPass:
    """A backward pass over a sequence: call :meth:`run`, :meth:`input_gradient`, then :meth:`weight_gradients`."""

    def __init__(self, ctx: Workspace, plan: RnnLayout, dtype: DType) -> None:
        self.xp = ctx.xp
        self.plan = plan
        buffers = [ctx.take(*spec) for spec in backward_scratch(plan, dtype)]
        self.d_gates, self.product, self.spare, self.d_state, self.d_cell = buffers[:5]
        self.gradients_before, self.matrix, self.rows = buffers[5:7], buffers[7], buffers[8]
        self.projection: Any = buffers[9] if plan.projected else None

    def run(
        self,
        weights: Weights,
        saved: SavedValues,
        states: RawArray,
        initial: tuple[RawArray, RawArray | None],
        d_out: RawArray,
        d_last: tuple[RawArray | None, RawArray | None],
        d_weights: Weights | None,
        reverse: bool,
        active: RawArray | None,
    ) -> None:
        """Propagate the gradients of the outputs and of the last state and cell back through all steps.

        Leave the gradients of ``initial`` in :attr:`d_state` and :attr:`d_cell`, and those of the gates before their
        activation in :attr:`d_gates`. ``d_weights``, unless None, gets the gradient of the projection.

        ``states`` (steps, batch, units) has the state after each step; ``initial`` is the state and cell before the
        first step. ``d_out`` has the gradient of each output; ``d_last`` those of the last state and cell (None: 0).
        """
        xp, plan = self.xp, self.plan
        for target, gradient in zip((self.d_state, self.d_cell), d_last, strict=True):
            if gradient is None:
                target.fill(0)
            else:
                xp.copyto(target, gradient)
        cell_step = CellGradient(xp, plan, weights, self.product, self.spare)
        d_before, c_before = self.gradients_before if active is not None else (self.d_state, self.d_cell)
        if d_weights is not None and plan.projected:
            d_weights.of_projection.fill(0)
        order = range(plan.steps) if reverse else range(plan.steps - 1, -1, -1)
        for t in order:
            earlier = t + 1 if reverse else t - 1
            is_first = not 0 <= earlier < plan.steps
            state = initial[0] if is_first else states[earlier]
            cell = None if saved.cells is None else initial[1] if is_first else saved.cells[earlier]
            if active is None:
                xp.add(self.d_state, d_out[t], out=self.d_state)
            else:
                xp.multiply(d_out[t], active[t], out=d_before)
                xp.add(self.d_state, d_before, out=self.d_state)
            if d_weights is not None and plan.projected:
                self._project(saved.hidden[t], d_weights, active, t)
            d_gates = self.d_gates[t]
            cell_step.step(saved, t, state, cell, self.d_state, self.d_cell, d_gates, d_before, c_before)
            if active is not None:
                xp.multiply(d_gates, active[t], out=d_gates)
                xp.copyto(self.d_state, d_before, where=active[t])
                xp.copyto(self.d_cell, c_before, where=active[t])

    def _project(self, hidden: RawArray, d_weights: Weights, active: RawArray | None, t: int) -> None:
        xp = self.xp
        d_state = self.d_state
        if active is not None:
            d_state = self.gradients_before[0]
            xp.multiply(self.d_state, active[t], out=d_state)
        matmul(xp, d_state.T, hidden, self.projection)
        xp.add(d_weights.of_projection, self.projection, out=d_weights.of_projection)

    def input_gradient(self, weights: Weights, out: RawArray, add: bool) -> None:
        """Write the input's gradient to ``out`` (steps, batch, inputs), or add it if ``add``."""
        xp, plan = self.xp, self.plan
        width = span(plan)
        for start in range(0, plan.steps, width):
            stop = min(start + width, plan.steps)
            rows = self.d_gates[start:stop].reshape(-1, plan.gates)
            target = out[start:stop].reshape(rows.shape[0], -1)
            if add:
                term = self.rows.reshape(-1)[: target.size].reshape(target.shape)
                product(xp, rows, weights.of_input, term)
                xp.add(target, term, out=target)
            else:
                product(xp, rows, weights.of_input, target)

    def weight_gradients(
        self, d_weights: Weights, x: RawArray, saved: SavedValues, states: RawArray, initial: RawArray, reverse: bool
    ) -> None:
        """Compute the gradients of biases and of all weights but the projection's; a gru overwrites ``d_gates``."""
        xp, plan = self.xp, self.plan
        d_gates = self.d_gates
        rows = d_gates.reshape(-1, plan.gates)
        product(xp, rows.T, x.reshape(rows.shape[0], -1), d_weights.of_input)
        wide = accumulator(rows.dtype)
        xp.sum(rows, axis=0, dtype=wide, out=d_weights.input_bias)
        if plan.mode == "gru":  # in gate n, r multiplies the state's product
            new = d_gates[:, :, 2 * plan.size :]
            xp.multiply(new, saved.gates[:, :, : plan.size], out=new)
        xp.sum(rows, axis=0, dtype=wide, out=d_weights.state_bias)
        edge = d_gates[-1] if reverse else d_gates[0]
        matmul(xp, edge.T, initial, d_weights.of_state)
        if plan.steps > 1:
            later, earlier = (d_gates[:-1], states[1:]) if reverse else (d_gates[1:], states[:-1])
            later, earlier = later.reshape(-1, plan.gates), earlier.reshape(-1, plan.units)
            product(xp, later.T, earlier, self.matrix)
            xp.add(d_weights.of_state, self.matrix, out=d_weights.of_state)
