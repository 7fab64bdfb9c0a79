"""The processor that kernels are compiled for, or the reason why none can be compiled; imports llvmlite on first use.

Kernels need vectors with fused multiply-add: AVX2 with FMA or AVX-512 on x86, NEON on 64-bit Arm. Only NumPy's kernels
are used without these, without llvmlite, or if the process may not make memory executable.
"""

from __future__ import annotations

import functools
import importlib
import platform
from dataclasses import dataclass
from types import ModuleType

from weftplan.support import slots

_WIDE = ("avx512f", "avx512vl", "avx512bw", "avx512dq")


@dataclass(frozen=True, slots=True)
class Target:
    """The processor that the compiler generates code for."""

    cpu: str
    features: str
    bits: int
    """Width of a vector register, in bits."""
    registers: int
    """Number of vector registers."""
    compiler: str
    """Versions of llvmlite and LLVM."""
    register: str = "x"
    """LLVM's inline assembly constraint for a vector register. Empty if the processor has no registers of ``bits``
    bits: the compiler then splits vectors, which is slower."""

    @property
    def name(self) -> str:
        """Name of the vector instructions for messages: ``AVX2``, ``AVX-512`` or ``NEON``."""
        return {512: "AVX-512", 256: "AVX2", 128: "NEON"}[self.bits]

    def lanes(self, itemsize: int) -> int:
        """Return the number of elements of ``itemsize`` bytes in a vector."""
        return self.bits // (8 * itemsize)

    @property
    def halves(self) -> bool:
        """Whether the processor has instructions that convert between float16 and float32."""
        return self.bits == 128 or "+f16c" in self.features

    @property
    def tile_sizes(self) -> tuple[int, ...]:
        """Numbers of positions that a product's tile may have, largest first: its sums, of two panels of channels, fit
        the registers together with their operands."""
        return (8, 4) if self.registers > 16 else (6, 4)


def binding() -> ModuleType:
    """Import and return ``llvmlite.binding``."""
    return importlib.import_module("llvmlite.binding")


@functools.cache
def host() -> Target | str:
    """Return this machine's processor, or the reason why no code can be compiled for it."""
    try:
        llvm = binding()
        package = importlib.import_module("llvmlite")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("llvmlite"):
            return "llvmlite is not installed: pip install 'weftplan[fast]'"
        return f"llvmlite cannot be imported: {error}"
    try:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.check_jit_execution()
        features = dict(llvm.get_host_cpu_features())
        cpu = llvm.get_host_cpu_name()
        versions = f"llvmlite {package.__version__}, LLVM {'.'.join(map(str, llvm.llvm_version_info))}"
    except (OSError, RuntimeError) as error:
        return f"this process may not compile code: {error}"
    return choose(platform.machine().lower(), cpu, features, versions)


def choose(machine: str, cpu: str, features: dict[str, bool], versions: str) -> Target | str:
    """Return the target for a processor with these features, or the reason why kernels do not support it."""
    listed = ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(features.items()))
    if machine in ("arm64", "aarch64"):
        return Target(cpu, listed, 128, 32, versions, "w")
    if machine in ("x86_64", "amd64"):
        if not (features.get("avx2") and features.get("fma")):
            return f"the processor ({cpu}) has no AVX2 with FMA"
        wide = all(features.get(name) for name in _WIDE)
        return Target(cpu, listed, *((512, 32, versions, "v") if wide else (256, 16, versions, "x")))
    return f"kernels are not written for {machine} processors"


slots.COMPILER.fill(host)
