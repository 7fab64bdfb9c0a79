"""Plan the memory of a program: when is each result alive, and at which bytes of one slab does it lie?

A program is a list of steps in the order of a single thread. Step i makes result i from earlier
results. The plan gives every result an offset in a slab. Two results may lie on the same bytes if, in this order, the
earlier one has been read for the last time before the later one is made. The planner sees sizes alone; it computes
nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One step: the numbers of the steps whose results it reads, and the bytes of its own result."""

    inputs: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """An offset for every result, in a slab of ``peak`` bytes."""

    steps: tuple[Step, ...]
    last: tuple[int, ...]  # number of the step that reads the result last
    offset: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Bytes of the slab."""
        return max((at + step.nbytes for at, step in zip(self.offset, self.steps, strict=True)), default=0)

    @property
    def lower_bound(self) -> int:
        """Most bytes that are alive at one step: no plan for this order needs less."""
        return max((sum(self.steps[i].nbytes for i in self.alive_at(k)) for k in range(len(self.steps))), default=0)

    @property
    def unshared(self) -> int:
        """Bytes without sharing."""
        return sum(step.nbytes for step in self.steps)

    def alive_at(self, step: int) -> list[int]:
        """Return the results that exist while a step runs: its own, and those that it or a later step reads."""
        return [i for i in range(step + 1) if self.last[i] >= step]

    def share_bytes(self, i: int, j: int) -> bool:
        """Return whether two results lie on a common byte."""
        return (
            self.offset[i] < self.offset[j] + self.steps[j].nbytes
            and self.offset[j] < self.offset[i] + self.steps[i].nbytes
        )


def last_reads(steps: list[Step], outputs: list[int]) -> list[int]:
    """Return for each result the step that reads it last; the caller reads ``outputs`` after all steps."""
    last = list(range(len(steps)))  # a result that nobody reads dies with its own step
    for number, step in enumerate(steps):
        for i in step.inputs:
            last[i] = number
    for i in outputs:
        last[i] = len(steps)
    return last


def make_plan(steps: list[Step], outputs: list[int]) -> Plan:
    """Place the results, the largest first, each at the lowest offset that is free during its whole life."""
    last = last_reads(steps, outputs)
    offset: dict[int, int] = {}
    for i in sorted(range(len(steps)), key=lambda k: -steps[k].nbytes):
        at = 0
        for j in sorted(offset, key=lambda k: offset[k]):
            both_alive = i <= last[j] and j <= last[i]
            if both_alive and offset[j] < at + steps[i].nbytes and at < offset[j] + steps[j].nbytes:
                at = offset[j] + steps[j].nbytes
        offset[i] = at
    return Plan(tuple(steps), tuple(last), tuple(offset[i] for i in range(len(steps))))


if __name__ == "__main__":
    chain = [Step((k - 1,) if k else (), 1000 * (k % 3 + 1)) for k in range(8)]
    plan = make_plan(chain, outputs=[7])
    for k, step in enumerate(plan.steps):
        print(f"result {k}: bytes {plan.offset[k]:5} to {plan.offset[k] + step.nbytes:5}, steps {k} to {plan.last[k]}")
    print(f"peak {plan.peak}, lower bound {plan.lower_bound}, without sharing {plan.unshared}")
