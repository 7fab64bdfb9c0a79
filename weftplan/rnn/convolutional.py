"""Convolutional cells, whose states are images (Shi et al., 2015).

A cell owns the names of its weights and builds symbols; it computes nothing itself. Only one thread may use a cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from weftplan import symbol as sym
from weftplan.errors import ParameterError
from weftplan.rnn.base import Activation, BaseRNNCell, RNNParams, StateInfo
from weftplan.rnn.cells import gru_step, lstm_step
from weftplan.symbol import Symbol

_LEAKY = partial(sym.LeakyReLU, act_type="leaky", slope=0.2)
Pair = tuple[int, int]


class BaseConvRNNCell(BaseRNNCell):
    """Base of convolutional cells: input and state enter the gates by convolutions.

    Args:
        input_shape: shape of the input of one step, batch included: (batch, channels, rows, columns).
        num_hidden: channels of output and state.
        h2h_kernel, h2h_dilate: settings of the state's convolution. Kernel sides must be odd; padding keeps the size.
        i2h_kernel, i2h_stride, i2h_pad, i2h_dilate: settings of the input's convolution.
        i2h_weight_initializer, …: initializers of weights and biases; None: the network's initializer.
        activation: name of an activation, or a function from a symbol to a symbol.
        prefix: prefix of names; default: ``ConvRNN_``, ``ConvLSTM_`` or ``ConvGRU_``, by class.
        conv_layout: must be ``NCHW``.
    """

    own_prefix: ClassVar[str] = ""

    def __init__(
        self,
        input_shape: Sequence[int],
        num_hidden: int,
        h2h_kernel: Pair = (3, 3),
        h2h_dilate: Pair = (1, 1),
        i2h_kernel: Pair = (3, 3),
        i2h_stride: Pair = (1, 1),
        i2h_pad: Pair = (1, 1),
        i2h_dilate: Pair = (1, 1),
        i2h_weight_initializer: object = None,
        h2h_weight_initializer: object = None,
        i2h_bias_initializer: object = "zeros",
        h2h_bias_initializer: object = "zeros",
        activation: Activation = _LEAKY,
        prefix: str | None = None,
        params: RNNParams | None = None,
        conv_layout: str = "NCHW",
    ) -> None:
        super().__init__(self.own_prefix if prefix is None else prefix, params)
        if conv_layout != "NCHW":
            raise ParameterError(f"{type(self).__name__}: conv_layout must be 'NCHW', got {conv_layout!r}")
        if any(size % 2 == 0 for size in h2h_kernel):
            raise ParameterError(
                f"{type(self).__name__}: h2h_kernel must be odd, so that states keep size, got {h2h_kernel}"
            )
        self._num_hidden = num_hidden
        self._activation = activation
        self._i2h: dict[str, Any] = {"kernel": i2h_kernel, "stride": i2h_stride, "pad": i2h_pad, "dilate": i2h_dilate}
        pad = tuple(d * (k - 1) // 2 for k, d in zip(h2h_kernel, h2h_dilate, strict=True))
        self._h2h: dict[str, Any] = {"kernel": h2h_kernel, "stride": (1, 1), "pad": pad, "dilate": h2h_dilate}
        shared = self._params
        self._iW = shared.get("i2h_weight", init=i2h_weight_initializer)
        self._hW = shared.get("h2h_weight", init=h2h_weight_initializer)
        self._iB = shared.get("i2h_bias", init=i2h_bias_initializer)
        self._hB = shared.get("h2h_bias", init=h2h_bias_initializer)
        image = sym.Convolution(sym.Variable("data"), num_filter=num_hidden, **self._i2h)
        outputs = image.infer_shape(data=tuple(input_shape))[1]
        assert outputs is not None  # the input shape suffices
        self._state_shape = (0, *outputs[0][1:])

    @property
    def state_info(self) -> list[StateInfo]:
        return [{"shape": self._state_shape, "__layout__": "NCHW"}]

    def _gates(self, inputs: Symbol, state: Symbol) -> tuple[Symbol, Symbol, str]:
        """Return the contributions of input and state to all gates, and the name prefix of the step."""
        self._counter += 1
        name = f"{self._prefix}t{self._counter}_"
        filters = self._num_hidden * len(self._gate_names)
        i2h = sym.Convolution(inputs, self._iW, self._iB, num_filter=filters, name=f"{name}i2h", **self._i2h)
        h2h = sym.Convolution(state, self._hW, self._hB, num_filter=filters, name=f"{name}h2h", **self._h2h)
        return i2h, h2h, name


class ConvRNNCell(BaseConvRNNCell):
    """Plain convolutional cell."""

    own_prefix = "ConvRNN_"

    @property
    def _gate_names(self) -> Sequence[str]:
        return ("",)

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        i2h, h2h, name = self._gates(inputs, states[0])
        output = self._get_activation(i2h + h2h, self._activation, name=f"{name}out")
        return output, [output]


class ConvLSTMCell(BaseConvRNNCell):
    """Convolutional long short-term memory."""

    own_prefix = "ConvLSTM_"

    @property
    def state_info(self) -> list[StateInfo]:
        return super().state_info * 2

    @property
    def _gate_names(self) -> Sequence[str]:
        return ("_i", "_f", "_c", "_o")

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        i2h, h2h, name = self._gates(inputs, states[0])
        return lstm_step(i2h + h2h, states[1], name, self._activation)


class ConvGRUCell(BaseConvRNNCell):
    """Convolutional gated recurrent unit."""

    own_prefix = "ConvGRU_"

    @property
    def _gate_names(self) -> Sequence[str]:
        return ("_r", "_z", "_o")

    def __call__(self, inputs: Symbol, states: Sequence[Symbol]) -> tuple[Symbol, list[Symbol]]:
        i2h, h2h, name = self._gates(inputs, states[0])
        return gru_step(i2h, h2h, states[0], name, self._activation)
