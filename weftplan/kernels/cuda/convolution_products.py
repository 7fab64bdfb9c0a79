"""Convolution and Deconvolution as matrix products by cuBLAS, for one tile of the windows at a time.

With the windows of an image as columns (``columns.py``), the kinds of computations are

    fprop   grid = weight · columns
    dgrad   columns = weightᵀ · grid, added back into the image
    wgrad   weight = Σ grid · columnsᵀ, over the tiles

A tile takes two launches. It consists of several images, or of several windows of one image, so that its columns fit
the operator's ``workspace``. In fprop and dgrad with a 1x1 kernel, stride 1 and no padding, the image itself serves as
columns.
"""

from __future__ import annotations

from collections.abc import Iterator

from weftplan.kernels.cuda.columns import Windows
from weftplan.ops.core import tiling
from weftplan.ops.core.cuda_gemm import DTYPES, gemm
from weftplan.ops.core.cuda_tuning import workspace_limit
from weftplan.ops.core.schema import DType, Params, Shape, aligned
from weftplan.ops.nn.convolution import window
from weftplan.support.array_types import ArrayModule, RawArray


class WindowProduct:
    """One computation of a call: its ``kind``, and the shapes of image, weight and grid of windows."""

    def __init__(self, kind: str, params: Params, image: Shape, weight: Shape, grid: Shape, dtype: DType) -> None:
        self.kind = kind
        self.batch = image[0]
        self.filters = grid[1]
        kernel, stride, dilate, pad = window(params, "Convolution")
        self.windows = Windows(image[1], image[2:], kernel, stride, dilate, pad, grid[2:])
        unit_windows = all(n == 1 for n in (*kernel, *stride)) and not any(pad)
        self.pointwise = unit_windows and image[2:] == grid[2:] and kind != "wgrad"
        self._weight = (weight[0], self.windows.taps)
        self._groups = params["num_group"]
        self._dtype = dtype
        self._limit = min(workspace_limit(params), tiling.GPU.tile_bytes)

    @property
    def refusal(self) -> str:
        """The reason why this module cannot compute the part; empty if it can."""
        if self._dtype.name not in DTYPES:
            return f"products of {self._dtype} are CuPy's"
        return "groups are CuPy's products" if self._groups > 1 else ""

    @property
    def _rows(self) -> int:
        """Number of rows of a tile: those of the columns, and in ``wgrad`` also those of the grid."""
        return self.windows.taps + (self.filters if self.kind == "wgrad" else 0)

    def _tile(self) -> tuple[int, int]:
        """Return the images of a full tile, and the windows of each image in it."""
        windows = self.windows.windows_per_image
        fitting = max(1, self._limit // (self._rows * self._dtype.itemsize))
        return (min(self.batch, fitting // windows), windows) if fitting >= windows else (1, fitting)

    @property
    def nbytes(self) -> int:
        """Scratch bytes of a full tile; 0 if the image itself serves as columns."""
        if self.pointwise:
            return 0
        images, run = self._tile()
        return aligned(images * run * self._rows * self._dtype.itemsize)

    def _tiles(self) -> Iterator[tuple[slice, int, int]]:
        images, step = self._tile()
        for begin_image in range(0, self.batch, images):
            for begin in range(0, self.windows.windows_per_image, step):
                yield slice(begin_image, begin_image + images), begin, min(step, self.windows.windows_per_image - begin)

    def run(self, xp: ArrayModule, image: RawArray, weight: RawArray, grid: RawArray, scratch: RawArray | None) -> None:
        """Enqueue the computation; ``scratch`` is flat, has the arrays' dtype and at least :attr:`nbytes` bytes."""
        weight = weight.reshape(self._weight)
        flat = grid.reshape(self.batch, self.filters, -1)
        if self.pointwise:
            pixels = image.reshape(self.batch, self.windows.channels, -1)
            if self.kind == "fprop":
                gemm(xp, weight, pixels, flat)
            else:
                gemm(xp, weight.T, flat, pixels)
            return
        taps = self.windows.taps
        assert scratch is not None
        for number, (tile_images, begin, run) in enumerate(self._tiles()):
            pixels, part = image[tile_images], flat[tile_images, :, begin : begin + run]
            images = pixels.shape[0]
            if self.kind == "wgrad":
                columns = scratch[: self._rows * images * run]
                self.windows.gather(xp, pixels, columns, begin, run, grid=flat[tile_images], joined=True)
                columns = columns.reshape(self._rows, images * run)
                gemm(xp, columns[taps:], columns[:taps].T, weight, add=number > 0)
                continue
            columns = scratch[: images * taps * run].reshape(images, taps, run)
            if self.kind == "fprop":
                self.windows.gather(xp, pixels, columns, begin, run)
                gemm(xp, weight, columns, part)
            else:
                gemm(xp, weight.T, part, columns)
                self.windows.sum_back(xp, columns, pixels, begin, run)
