"""Unpacking of gradient codes: every method compiles and gives the same bits."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from weftplan.kernels.compiled import ir, jit
from weftplan.kernels.compiled.exchange import codec
from weftplan.kernels.compiled.target import Target, host
from weftplan.kvstore.compression import Compression

HOST = host()
pytestmark = pytest.mark.skipif(isinstance(HOST, str) or HOST.bits == 128, reason="x86 with AVX2 only")


@pytest.mark.parametrize("bits", [1, 2])
def test_code_for_avx512_compiles(bits: int) -> None:
    """Code for AVX-512 compiles on any x86; two-bit codes use the 512-bit table look-up instruction."""
    assert isinstance(HOST, Target)
    features = ",".join(f"+avx512{part}" for part in ("f", "vl", "bw", "dq"))
    target = Target("skylake-avx512", features, 512, 32, HOST.compiler, "v")
    text = ir.module([codec._unpack(bits, 3, codec._looks_up(target), past=past) for past in (False, True)], 512)
    assert text.count("declare <16 x float> @llvm.x86.avx512.vpermilvar.ps.512") == (bits == 2)
    assert jit.compiled(text, target)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("count", [1, 4])
def test_without_that_instruction_bits_are_the_same(bits: int, count: int) -> None:
    """Without the look-up instruction, comparing codes gives the same bits."""
    assert isinstance(HOST, Target)
    plain = replace(HOST, register="")
    assert codec._looks_up(HOST) == HOST.bits
    assert codec._looks_up(plain) == 0
    size, rule = 4096, Compression(0.3, f"{bits}bit")
    rng = np.random.default_rng(count)
    packed = [np.zeros(rule.packed_size(size), np.uint8) for _ in range(count)]
    for codes in packed:
        rule.pack(rng.standard_normal(size, np.float32), np.zeros(size, np.float32), codes)
    results = []
    for target in (HOST, plain):
        out = np.empty(size, np.float32)
        entry = jit.library(
            f"test-unpack-{bits}-{count}-{target.register}",
            lambda target: [codec._unpack(bits, count, codec._looks_up(target), past=False)],
            ("unpack",),
            target,
        )["unpack"]
        words = np.array([0, size, 0, *(array.ctypes.data for array in (out, *packed))], np.int64)
        words[2:3].view(np.float32)[0] = ctypes.c_float(0.3).value
        entry(words.ctypes.data)
        results.append(out.tobytes())
    assert results[0] == results[1]
