"""Random networks of convolutions and the operators that usually surround them in image networks."""

from __future__ import annotations

from typing import Any, ClassVar

import weftplan as mx
from tests.stress.random_graphs import ACTIVATIONS, Maker

sym = mx.sym


class ImageMaker(Maker):
    """Builder of networks with convolutions that need every variant of the compiled kernels.

    The variants are bands of rows, several images in one call, single channels, strides, dilations, one to three axes.
    """

    inputs: ClassVar[dict[str, tuple[int, ...]]] = {
        "x0": (2, 8, 20, 23),
        "x1": (5, 6, 9, 7),
        "x2": (2, 8, 20, 23),
        "x3": (3, 4, 40),
        "x4": (1, 4, 6, 7, 9),
    }
    most_elements = 1 << 16

    def _make(self, name: str) -> Any:
        kind = self.rng.randrange(11)
        if kind < 5:
            return self._convolution(name)
        if kind == 10:
            return self._depthwise_block(name)
        if kind == 5:
            return sym.BatchNorm(self._pick()[0], fix_gamma=self.rng.random() < 0.5, name=name)
        if kind == 6:
            return sym.Activation(self._pick()[0], act_type=self.rng.choice(ACTIVATIONS), name=name)
        if kind == 7:
            x, shape = self._pick()
            return sym.Concat(x, self._like(shape), dim=1, name=name)
        if kind == 8:
            x, shape = self._pick()
            return sym.elemwise_add(x, self._like(shape), name=name)
        if self.rng.random() < 0.3:
            return self._pooling(name)
        return super()._make(name)

    def _pooling(self, name: str) -> Any:
        rng = self.rng
        x, shape = self._pick()
        if len(shape) < 3:
            return None
        axes = len(shape) - 2
        kernel = tuple(rng.choice((1, 2, 2, 3)) for _ in range(axes))
        common = {
            "kernel": kernel, "stride": kernel if rng.random() < 0.5 else (rng.choice((1, 2)),) * axes,
            "pad": tuple(rng.randrange((k + 1) // 2) for k in kernel), "name": name,
            "pooling_convention": rng.choice(("valid", "full")),
        }  # fmt: skip
        kind = rng.choice(("max", "max", "avg", "sum"))
        more = {"count_include_pad": rng.random() < 0.5} if kind == "avg" else {}
        return sym.Pooling(x, pool_type=kind, **common, **more)

    def _depthwise_block(self, name: str) -> Any:
        """Return batch norm, relu, depthwise convolution, batch norm, and often a second relu.

        Sometimes another node reads an intermediate. Return None if the chosen array is no image of at least 3x3
        pixels.
        """
        rng = self.rng
        x, shape = self._pick()
        if len(shape) != 4 or min(shape[2:]) < 3:
            return None
        norm = {"fix_gamma": rng.random() < 0.3, "use_global_stats": rng.random() < 0.1}
        before = sym.BatchNorm(x, name=f"{name}_before", **norm)
        before = sym.Activation(before, act_type="relu", name=f"{name}_relu")
        side = rng.choice((1, 1, 2))
        layer = sym.Convolution(
            before, kernel=(3, 3), stride=(side, side), pad=(1, 1), num_filter=shape[1], num_group=shape[1],
            no_bias=rng.random() < 0.9, name=f"{name}_layer",
        )  # fmt: skip
        behind = sym.BatchNorm(layer, name=f"{name}_behind", fix_gamma=rng.random() < 0.3)
        if rng.random() < 0.7:
            behind = sym.Activation(behind, act_type="relu", name=f"{name}_relu_behind")
        between = rng.choice((before, layer, None, None, None))
        return behind if between is None else sym.broadcast_add(behind, sym.mean(between), name=f"{name}_sum")

    def _convolution(self, name: str) -> Any:
        rng = self.rng
        x, shape = self._pick()
        if len(shape) < 3:
            return None
        axes, channels = len(shape) - 2, shape[1]

        def per_axis(*values: int) -> tuple[int, ...]:
            return tuple(rng.choice(values) for _ in range(axes))

        kernel = per_axis(1, 2, 3, 5)
        groups = rng.choice([n for n in (1, 1, 2, channels) if channels % n == 0])
        # Grouped forms: a filter per channel, or several per group.
        filters = groups * rng.choice((1, 2, 5) if groups == channels else (1, 3, 8))
        stride, dilate = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 1, 2))
        common = {
            "kernel": kernel, "stride": (stride,) * axes, "dilate": (dilate,) * axes, "pad": per_axis(0, 1, 2),
            "num_filter": filters, "num_group": groups, "no_bias": rng.random() < 0.5, "name": name,
        }  # fmt: skip
        if rng.random() < 0.75:
            return sym.Convolution(x, **common)
        return sym.Deconvolution(x, **common)


class SliceMaker(ImageMaker):
    """Builder of networks whose convolutions have enough channels for filters to be packed in slices."""

    inputs: ClassVar[dict[str, tuple[int, ...]]] = {"x0": (1, 200, 7, 6), "x1": (2, 330, 5), "x2": (1, 200, 7, 6)}

    def _convolution(self, name: str) -> Any:
        rng = self.rng
        x, shape = self._pick()
        if len(shape) < 3 or shape[1] < 100:
            return None
        axes = len(shape) - 2
        stride = rng.choice((1, 1, 2))
        common = {
            "kernel": (rng.choice((3, 5)),) * axes, "stride": (stride,) * axes, "pad": (rng.choice((0, 1, 2)),) * axes,
            "num_filter": rng.choice((130, 200, 257, 330)), "no_bias": rng.random() < 0.5, "name": name,
        }  # fmt: skip
        return (sym.Convolution if rng.random() < 0.75 else sym.Deconvolution)(x, **common)
