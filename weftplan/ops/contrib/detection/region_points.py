"""Sample points within regions of interest, for operators that average samples per region.

A step takes one sample in every cell, for all channels. The scratch therefore does not grow with the number of samples
per cell, which may depend on the size of a region. RROIAlign and DeformablePSROIPooling use it. ROIAlign does not: the
points of an unrotated region are a row grid times a column grid, so it takes two small matrix products, which need a
quarter of the processor time (64 regions of 7x7 cells, 256 channels: 12 to 19 ms against 49 to 62 ms, Zen 4 with
AVX-512, 2026-11-29) and round differently. PSROIPooling averages whole pixels and samples nothing.
"""

from __future__ import annotations

import numpy as np

from weftplan.ops.core.kernels import INDEX, accumulator
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import DType, Shape, Workspace
from weftplan.ops.nn.sampling import Sampler, sampler_bytes
from weftplan.support.array_types import RawArray


class Cells:
    """Scratch for sampling ``channels`` channels at one point in each of ``cells`` cells, added up in ``total``."""

    def __init__(self, ctx: Workspace, channels: int, cells: int, image: Shape, dtype: DType) -> None:
        wide = accumulator(dtype)
        self._xp = ctx.xp
        buffers = [ctx.take(*spec) for spec in _scratch(channels, cells, image, dtype)]
        self.points, self.planes, self.total, self.gradient, self._image = buffers
        self._widens = wide != dtype
        self.sampler = Sampler(ctx, channels, cells, wide, pixels=True)

    def image(self, data: RawArray) -> RawArray:
        """Return ``data``, converted to the accumulator's dtype if that is wider."""
        if not self._widens:
            return data
        wide = self._image.reshape(data.shape)
        self._xp.copyto(wide, data)
        return wide

    def set_points(self, x: RawArray, y: RawArray, inside: RawArray) -> None:
        """Set the points of the next sample from host arrays; a point that is not ``inside`` gives 0."""
        points = np.where(inside, np.stack((x, y)), -2.0)
        self.points[...] = self._xp.asarray(points, dtype=self.points.dtype)


def _scratch(channels: int, cells: int, image: Shape, dtype: DType) -> list[tuple[Shape, DType]]:
    wide = accumulator(dtype)
    size: Shape = image if wide != dtype else (0,)
    return [((2, cells), wide), ((cells,), INDEX), ((channels, cells), wide), ((2, cells), wide), (size, wide)]


def cells_bytes(channels: int, cells: int, image: Shape, dtype: DType) -> int:
    """Return the workspace bytes of :class:`Cells`."""
    return take_bytes(*_scratch(channels, cells, image, dtype)) + sampler_bytes(channels, cells, accumulator(dtype))
