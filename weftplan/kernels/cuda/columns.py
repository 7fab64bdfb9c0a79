"""Copy windows of images to columns of a matrix (im2col), and add such columns back to images (col2im).

Each takes one launch, for images with one to three axes. Padding is not stored: a window reads zeros beyond the image.
In col2im each thread adds up the columns of one element of an image, in the order of the positions within the window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from weftplan.ops.core.cuda_source import each, floats
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.schema import Arrays, OpContext, Params, Shape
from weftplan.ops.nn.columns import window, window_counts
from weftplan.support.array_types import ArrayModule, RawArray

_SIZES = """int channels, int d, int h, int w, int kd, int kh, int kw, int sd, int sh, int sw,
                    int ed, int eh, int ew, int pd, int ph, int pw, int gd, int gh, int gw,
                    int begin, int run, int taps, long long over, long long down"""
_SOURCE = f"""
extern "C" __global__ void gather_windows(const T* image, const T* grid, T* columns, {_SIZES},
                    int filters, long long count) {{
    unsigned int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    int g = k % run;
    int r = k / run % (taps + filters);
    int n = k / run / (taps + filters);
    int place = begin + g;
    T value = (T)0.0f;
    if (r >= taps) {{
        value = grid[((long long)n * filters + r - taps) * gd * gh * gw + place];
    }} else {{
        int x = place % gw * sw + r % kw * ew - pw;
        int y = place / gw % gh * sh + r / kw % kh * eh - ph;
        int z = place / gw / gh * sd + r / kw / kh % kd * ed - pd;
        int c = r / kw / kh / kd;
        if (x >= 0 && x < w && y >= 0 && y < h && z >= 0 && z < d)
            value = image[((((long long)n * channels + c) * d + z) * h + y) * w + x];
    }}
    columns[n * over + r * down + g] = value;
}}

extern "C" __global__ void sum_windows(const T* columns, T* image, {_SIZES}, int more, long long count) {{
    unsigned int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    int ix = k % w;
    int iy = k / w % h;
    int iz = k / w / h % d;
    int c = k / w / h / d % channels;
    int n = k / w / h / d / channels;
    A sum = more == 1 ? (A)image[k] : (A)0;
    for (int l = 0; l < kd; ++l) {{
        int z = iz + pd - l * ed;
        if (z < 0 || z % sd != 0 || z / sd >= gd) continue;
        for (int i = 0; i < kh; ++i) {{
            int y = iy + ph - i * eh;
            if (y < 0 || y % sh != 0 || y / sh >= gh) continue;
            for (int j = 0; j < kw; ++j) {{
                int x = ix + pw - j * ew;
                if (x < 0 || x % sw != 0 || x / sw >= gw) continue;
                int place = (z / sd * gh + y / sh) * gw + x / sw - begin;
                if (place < 0 || place >= run) continue;
                sum += (A)columns[n * over + (((long long)c * kd + l) * kh + i) * kw * down + j * down + place];
            }}
        }}
    }}
    image[k] = (T)sum;
}}
"""


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows over images with ``channels`` and spatial extents ``image``; ``grid`` is their number per axis."""

    channels: int
    image: Shape
    kernel: Shape
    stride: Shape
    dilate: Shape
    pad: Shape
    grid: Shape

    @property
    def taps(self) -> int:
        """Number of rows of the columns: the elements of a window over all channels."""
        return self.channels * math.prod(self.kernel)

    @property
    def windows_per_image(self) -> int:
        """Number of windows of one image."""
        return math.prod(self.grid)

    def _numbers(self, begin: int, run: int, over: int, down: int) -> tuple[np.int32 | int, ...]:
        def three(sizes: Shape, fill: int) -> Shape:
            return (fill,) * (3 - len(sizes)) + tuple(sizes)

        rows = (three(self.image, 1), three(self.kernel, 1), three(self.stride, 1), three(self.dilate, 1),
                three(self.pad, 0), three(self.grid, 1))  # fmt: skip
        sizes = [self.channels, *(size for row in rows for size in row), begin, run, self.taps]
        return (*(np.int32(size) for size in sizes), over, down)

    def gather(
        self,
        xp: ArrayModule,
        image: RawArray,
        columns: RawArray,
        begin: int,
        run: int,
        *,
        grid: RawArray | None = None,
        joined: bool = False,
    ) -> None:
        """Write the columns of the windows [begin, begin + run) of each image, and the rows of ``grid`` below them.

        Args:
            xp: the array module.
            image: images of shape (images, channels, …).
            columns: the target, of shape (images, rows, run), or (rows, images, run) if ``joined``.
            begin: first window.
            run: number of windows.
            grid: None, or an array (images, filters, windows) that adds ``filters`` rows to the target.
            joined: whether the columns of all images form one matrix.
        """
        images, filters = image.shape[0], 0 if grid is None else grid.shape[1]
        rows = self.taps + filters
        over, down = (run, images * run) if joined else (rows * run, run)
        numbers = self._numbers(begin, run, over, down)
        args = (image, image if grid is None else grid, columns, *numbers, np.int32(filters))
        each(xp, _SOURCE, "gather_windows", images * rows * run, args, T=image.dtype)

    def sum_back(self, xp: ArrayModule, columns: RawArray, image: RawArray, begin: int, run: int) -> None:
        """Add columns, of shape (images, taps, run), to the elements of ``image`` that :meth:`gather` read.

        If ``begin`` is 0, ``image`` is overwritten, with zeros where no window is.
        """
        args = (columns, image, *self._numbers(begin, run, self.taps * run, run), np.int32(begin > 0))
        each(xp, _SOURCE, "sum_windows", image.size, args, T=image.dtype)


def _of(params: Params, image: Shape, name: str) -> Windows:
    return Windows(image[1], image[2:], *window(params, name), window_counts(params, image[2:], name))


def _im2col(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    windows = _of(params, inputs[0].shape, "im2col")
    windows.gather(ctx.xp, inputs[0], outputs[0], 0, windows.windows_per_image)


def _col2im(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    windows = _of(params, outputs[0].shape, "col2im")
    windows.sum_back(ctx.xp, inputs[0], outputs[0], 0, windows.windows_per_image)


def _nothing(params: Params, inputs: Specs, outputs: Specs) -> int:
    return 0


for _name, _kernel in (
    ("im2col", _im2col), ("_backward_im2col", _col2im), ("col2im", _col2im), ("_backward_col2im", _im2col),
):  # fmt: skip
    provide(_name, Implementation(name="cuda", kernel=_kernel, workspace=_nothing, refusal=floats(0)), on="gpu")
