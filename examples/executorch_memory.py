"""Plan the memory of an ExecuTorch program with weftplan: an algorithm for ``MemoryPlanningPass``.

    from executorch.exir.passes import MemoryPlanningPass
    suite = MemoryPlanningAlgorithmSuite([plan_with_weftplan])
    program = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(suite)))

Needs the package executorch; without it the example says so and ends.
"""

from __future__ import annotations

from typing import Any

from weftplan.planner import pack


def plan_with_weftplan(
    alignment: int, specs: Any, graph_module: Any, graph_signature: Any, extra_padding: int = 0
) -> Any:
    """Return the bank and the offset of each tensor of ``specs``; each bank is packed on its own.

    Bytes that submodules of the graph need come first in each bank. A view lies in its base.
    """
    from executorch.exir.memory_planning import MemoryAlgoResult, SpecAllocResult

    below = getattr(graph_module, "input_mem_buffer_sizes", None) or []
    banks: dict[int, list[Any]] = {}
    results: dict[Any, Any] = {}
    for spec in specs:
        spec.realign(alignment)
        number = 1 if spec.mem_id is None else spec.mem_id
        results[spec] = SpecAllocResult(number, 0, 0)
        if getattr(spec, "storage_base", None) is None and spec.allocated_memory:
            banks.setdefault(number, []).append(spec)
    sizes = [0] * (max(banks, default=1) + 1)
    for number, members in banks.items():
        first = below[number] if number < len(below) else 0
        births = [spec.lifetime[0] for spec in members]
        deaths = [spec.lifetime[1] + 1 for spec in members]
        packing = pack(births, deaths, [spec.allocated_memory for spec in members], alignment=alignment)
        for rank, (spec, offset) in enumerate(zip(members, packing.offsets.tolist(), strict=True)):
            results[spec] = SpecAllocResult(number, rank, first + offset)
        sizes[number] = first + packing.peak + extra_padding
    for spec in results:
        base, shift = spec, 0
        while getattr(base, "storage_base", None) is not None:
            base, shift = base.storage_base, shift + base.storage_base_offset
        if base is not spec:
            owner = results[base]
            results[spec] = SpecAllocResult(owner.mem_id, owner.mem_obj_id, owner.mem_offset + shift)
    return MemoryAlgoResult(results, sizes)


def main() -> None:
    """Export a small network with ExecuTorch's planner and with this adapter, and print both arenas."""
    try:
        import torch
        from executorch.exir import ExecutorchBackendConfig, to_edge
        from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite
        from executorch.exir.passes import MemoryPlanningPass
    except ImportError as error:
        print(f"this example needs executorch: {error}")
        return
    net = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Conv2d(3 if k == 0 else 8, 8, 3), torch.nn.ReLU()) for k in range(4))
    )
    exported = torch.export.export(net.eval(), (torch.zeros(1, 3, 32, 32),))
    for name, planning in (
        ("executorch", MemoryPlanningPass()),
        ("weftplan", MemoryPlanningPass(MemoryPlanningAlgorithmSuite([plan_with_weftplan]))),
    ):
        program = to_edge(exported).to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))
        sizes = program.executorch_program.execution_plan[0].non_const_buffer_sizes
        print(f"{name}: {sum(sizes):,} bytes of arenas")


if __name__ == "__main__":
    main()
