"""Plan the memory of a tinygrad schedule with weftplan: offsets instead of those of tinygrad's TLSF allocator.

    from tinygrad.schedule import memory
    schedule.memory_plan_rewrite = planned_with_weftplan(memory)

tinygrad's rewrite asks an allocator for each buffer of the schedule in turn. The rewrite runs twice here: first with
allocators that record when each buffer lives, then with allocators that give out the packed offsets.

Needs the package tinygrad; without it the example says so and ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weftplan.planner import pack


class Recorder:
    """Allocators of one rewrite: records lifetimes, then gives out the offsets of a packing in the same order."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.planned: list[list[int]] = []
        """Offsets of each lane in order of allocation; empty while lifetimes are recorded."""
        self.clock = 0

    def lane(self, size: int, **options: Any) -> Lane:
        """Return an allocator for one lane of buffers; it replaces the class ``TLSFAllocator``."""
        offsets = self.planned[len(self.lanes)] if self.planned else []
        self.lanes.append(Lane(self, offsets))
        return self.lanes[-1]

    def pack(self) -> None:
        """Pack the recorded buffers of every lane, and begin again."""
        self.planned = [
            pack(lane.births, [lane.deaths.get(k, self.clock) for k in range(len(lane.births))], lane.sizes)
            .offsets.tolist()
            for lane in self.lanes
        ]  # fmt: skip
        self.lanes = []


class Lane:
    """An allocator with tinygrad's methods. While it records, the offset of a buffer is its number."""

    def __init__(self, recorder: Recorder, offsets: list[int]) -> None:
        self.recorder, self.offsets = recorder, offsets
        self.births: list[int] = []
        self.sizes: list[int] = []
        self.deaths: dict[int, int] = {}

    def alloc(self, size: int) -> int:
        """Return the offset of the next buffer."""
        number = len(self.births)
        self.recorder.clock += 1
        self.births.append(self.recorder.clock)
        self.sizes.append(size)
        return self.offsets[number] if self.offsets else number

    def free(self, offset: int) -> None:
        """Record the end of a buffer."""
        self.recorder.clock += 1
        if not self.offsets:
            self.deaths[offset] = self.recorder.clock


def planned_with_weftplan(memory: Any) -> Callable[..., Any]:
    """Return the rewrite of ``memory``, the module ``tinygrad.schedule.memory``, with packed offsets."""
    rewrite = memory.memory_plan_rewrite

    def planned(linear: Any, held_bufs: Any = None) -> Any:
        recorder, allocator = Recorder(), memory.TLSFAllocator
        memory.TLSFAllocator = recorder.lane
        try:
            rewrite(linear, held_bufs)
            recorder.pack()
            return rewrite(linear, held_bufs)
        finally:
            memory.TLSFAllocator = allocator

    return planned


def main() -> None:
    """Schedule a small network with tinygrad's planner and with this adapter, and print both arenas."""
    try:
        from tinygrad import Tensor, schedule
        from tinygrad.schedule import memory
    except ImportError as error:
        print(f"this example needs tinygrad: {error}")
        return
    sizes: list[int] = []
    new_buffer = memory.UOp.new_buffer

    def counted(device: Any, size: int, dtype: Any, **options: Any) -> Any:
        sizes.append(size)
        return new_buffer(device, size, dtype, **options)

    own = schedule.memory_plan_rewrite
    for name, rewrite in (("tinygrad", own), ("weftplan", planned_with_weftplan(memory))):
        hidden = Tensor.empty(64, 96)
        for width in (256, 128, 512, 96):
            hidden = hidden.matmul(Tensor.empty(hidden.shape[-1], width)).contiguous()
            hidden = hidden + hidden.relu().sum(axis=0).contiguous()
        schedule.memory_plan_rewrite, memory.UOp.new_buffer = rewrite, counted
        sizes.clear()
        try:
            hidden.schedule_linear()
        finally:
            schedule.memory_plan_rewrite, memory.UOp.new_buffer = own, new_buffer
        print(f"{name}: {sizes[-1] if sizes else 0:,} bytes of arenas")


if __name__ == "__main__":
    main()
