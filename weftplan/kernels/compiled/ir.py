"""A small builder of LLVM IR as text, with vectors and loops.

A :class:`Function` collects the instructions of one function. Values are names (``%t12``) or Python integers, which are
folded if possible. Vectors have :attr:`Function.lanes` elements of one floating-point type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

Value = str | int
"""The name of a value, or an integer constant."""


class Function:
    """Builder of one function, which returns nothing or a pointer.

    Its methods append instructions. A method that emits a value returns the value's name.

    Args:
        name: symbol of the function.
        arguments: (type, name) of each argument; the type is ``ptr`` or ``i64``.
        scalar: type of a vector's elements, ``float`` or ``double``.
        lanes: number of elements of a vector.
        local: whether only other functions of the module call this function.
    """

    def __init__(
        self, name: str, arguments: Sequence[tuple[str, str]], scalar: str, lanes: int, *, local: bool = False
    ) -> None:
        self.name = name
        self.arguments = tuple(arguments)
        self.scalar = scalar
        self.lanes = lanes
        self.size = 4 if scalar == "float" else 8
        self.vector = f"<{lanes} x {scalar}>"
        self._suffix = f"v{lanes}f{8 * self.size}"
        self._local = local
        self._entry: list[str] = []
        self._lines: list[str] = []
        self._count = 0
        self._block = "entry"
        self._loops: list[int] = []
        self.result: str | None = None
        """Name of the pointer that the function returns; None: it returns nothing."""
        self.declared: dict[str, None] = {}
        """External functions that this function calls, in addition to those that every module declares."""

    def within(self, name: str) -> Function:
        """Rename this function, make it local to its module, and return it."""
        self.name, self._local = name, True
        return self

    def declare(self, text: str) -> None:
        """Add ``text``, the LLVM declaration of an external function that this function calls, to the module."""
        self.declared[text] = None

    # Instructions

    def emit(self, text: str) -> None:
        """Append an instruction without a result."""
        self._lines.append("  " + text)

    def value(self, text: str) -> str:
        """Append an instruction; return the name of its result."""
        self._count += 1
        name = f"%t{self._count}"
        self._lines.append(f"  {name} = {text}")
        return name

    def local(self, kind: str, count: int = 1) -> str:
        """Reserve stack space for ``count`` values of type ``kind``; return its pointer."""
        self._count += 1
        name = f"%s{self._count}"
        self._entry.append(f"  {name} = alloca {kind}, i64 {count}, align 64")
        return name

    def add(self, a: Value, b: Value) -> Value:
        """Emit the sum of two 64-bit integers."""
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        return a if b == 0 else b if a == 0 else self.value(f"add nsw i64 {a}, {b}")

    def sub(self, a: Value, b: Value) -> Value:
        """Emit the difference ``a - b`` of two 64-bit integers."""
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        return a if b == 0 else self.value(f"sub nsw i64 {a}, {b}")

    def mul(self, a: Value, b: Value) -> Value:
        """Emit the product of two 64-bit integers."""
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        return a if b == 1 else b if a == 1 else self.value(f"mul nsw i64 {a}, {b}")

    def smaller(self, a: Value, b: Value) -> str:
        """Emit the minimum of two signed integers."""
        return self.value(f"call i64 @llvm.smin.i64(i64 {a}, i64 {b})")

    def larger(self, a: Value, b: Value) -> str:
        """Emit the maximum of two signed integers."""
        return self.value(f"call i64 @llvm.smax.i64(i64 {a}, i64 {b})")

    def compare(self, how: str, a: Value, b: Value) -> str:
        """Emit a comparison of two integers; ``how`` is LLVM's name for it: ``slt``, ``eq``, …"""
        return self.value(f"icmp {how} i64 {a}, {b}")

    def choose(self, condition: str, a: Value, b: Value) -> str:
        """Emit a selection of 64-bit integers: ``a`` if the condition is true, else ``b``."""
        return self.value(f"select i1 {condition}, i64 {a}, i64 {b}")

    # Memory; offsets are bytes

    def at(self, pointer: str, offset: Value) -> str:
        """Emit the address ``offset`` bytes after ``pointer``."""
        return pointer if offset == 0 else self.value(f"getelementptr i8, ptr {pointer}, i64 {offset}")

    def word(self, pointer: str, index: Value = 0) -> str:
        """Emit a load of element ``index`` of an array of 64-bit integers."""
        element = pointer if index == 0 else self.value(f"getelementptr i64, ptr {pointer}, i64 {index}")
        return self.value(f"load i64, ptr {element}, align 8")

    def pointer(self, pointer: str, index: Value = 0) -> str:
        """Emit a load of element ``index`` of an array of pointers."""
        element = pointer if index == 0 else self.value(f"getelementptr i64, ptr {pointer}, i64 {index}")
        return self.value(f"load ptr, ptr {element}, align 8")

    def keep(self, value: Value, array: str, index: Value = 0) -> None:
        """Emit a store of a 64-bit integer to element ``index`` of the array at ``array``."""
        target = array if index == 0 else self.value(f"getelementptr i64, ptr {array}, i64 {index}")
        self.emit(f"store i64 {value}, ptr {target}, align 8")

    def scalar_at(self, pointer: str) -> str:
        """Emit a load of a scalar."""
        return self.value(f"load {self.scalar}, ptr {pointer}, align {self.size}")

    def put_scalar(self, value: str, pointer: str) -> None:
        """Emit a store of a scalar."""
        self.emit(f"store {self.scalar} {value}, ptr {pointer}, align {self.size}")

    def load(self, pointer: str) -> str:
        """Emit a load of a vector from any address."""
        return self.value(f"load {self.vector}, ptr {pointer}, align {self.size}")

    def store(self, value: str, pointer: str) -> None:
        """Emit a store of a vector to any address."""
        self.emit(f"store {self.vector} {value}, ptr {pointer}, align {self.size}")

    def store_past(self, value: str, pointer: str) -> None:
        """Emit a non-temporal store of a vector, to an address aligned to its size; :meth:`fence` must follow."""
        size = self.lanes * self.size
        self.emit(f"store {self.vector} {value}, ptr {pointer}, align {size}, !nontemporal !2")

    def prefetch(self, pointer: str) -> None:
        """Emit a prefetch of a cache line into the second-level cache; an invalid address is harmless.

        Prefetches into the first-level cache would occupy all its fill buffers, so that unrelated loads wait: layers of
        few channels took a tenth longer.
        """
        self.declare("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        self.emit(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 0, i32 2, i32 1)")

    def fence(self) -> None:
        """Emit a fence: a thread that is notified afterwards sees all earlier stores, also the non-temporal stores."""
        self.emit("fence seq_cst")

    def store_first(self, value: str, pointer: str, count: int) -> None:
        """Emit a store of the first ``count`` elements of a vector."""
        if count == self.lanes:
            self.store(value, pointer)
            return
        part = self.shuffle(value, "poison", range(count))
        self.emit(f"store <{count} x {self.scalar}> {part}, ptr {pointer}, align {self.size}")

    def load_first(self, pointer: str, count: int) -> str:
        """Emit a load of ``count`` elements; the rest of the vector is undefined."""
        if count == self.lanes:
            return self.load(pointer)
        kind = f"<{count} x {self.scalar}>"
        part = self.value(f"load {kind}, ptr {pointer}, align {self.size}")
        lanes = ", ".join(f"i32 {lane if lane < count else 'poison'}" for lane in range(self.lanes))
        lanes = lanes.replace("i32 poison", "i32 0")
        return self.value(f"shufflevector {kind} {part}, {kind} poison, <{self.lanes} x i32> <{lanes}>")

    # Halves: float16 in memory, float32 in registers

    @property
    def _halves(self) -> str:
        return f"<{self.lanes} x half>"

    def load_halves(self, pointer: str, mask: str | None = None) -> str:
        """Emit a load of a float32 vector from float16 elements; lanes whose mask is off are zero and not read."""
        kind, name = self._halves, f"@llvm.masked.load.v{self.lanes}f16.p0"
        if mask is None:
            halves = self.value(f"load {kind}, ptr {pointer}, align 2")
        else:
            masks = f"<{self.lanes} x i1>"
            self.declare(f"declare {kind} {name}(ptr, i32, {masks}, {kind})")
            halves = self.value(f"call {kind} {name}(ptr {pointer}, i32 2, {masks} {mask}, {kind} zeroinitializer)")
        return self.value(f"fpext {kind} {halves} to {self.vector}")

    def store_halves(self, value: str, pointer: str, count: int) -> None:
        """Emit a store of the first ``count`` elements of a vector of float32, rounded to float16."""
        halves = self.value(f"fptrunc {self.vector} {value} to {self._halves}")
        kind = self._halves
        if count < self.lanes:
            kind = f"<{count} x half>"
            which = ", ".join(f"i32 {lane}" for lane in range(count))
            halves = self.value(
                f"shufflevector {self._halves} {halves}, {self._halves} poison, <{count} x i32> <{which}>"
            )
        self.emit(f"store {kind} {halves}, ptr {pointer}, align 2")

    def put_half(self, value: str, pointer: str) -> None:
        """Emit a store of a float32 element, rounded to float16."""
        self.emit(f"store half {self.value(f'fptrunc float {value} to half')}, ptr {pointer}, align 2")

    def load_masked(self, pointer: str, mask: str) -> str:
        """Emit a load of a vector; lanes whose mask is off are zero and not read."""
        kind = self.vector
        mask_kind = f"<{self.lanes} x i1>"
        return self.value(
            f"call {kind} @llvm.masked.load.{self._suffix}.p0(ptr {pointer}, i32 {self.size}, {mask_kind} {mask}, "
            f"{kind} zeroinitializer)"
        )

    def store_masked(self, value: str, pointer: str, mask: str) -> None:
        """Emit a store of the lanes of a vector whose mask is on."""
        self.emit(
            f"call void @llvm.masked.store.{self._suffix}.p0({self.vector} {value}, ptr {pointer}, i32 {self.size}, "
            f"<{self.lanes} x i1> {mask})"
        )

    def mask_below(self, count: Value) -> str:
        """Emit the mask of the first ``count`` lanes; ``count`` may be negative or exceed the number of lanes."""
        kind = f"<{self.lanes} x i64>"
        numbers = ", ".join(f"i64 {lane}" for lane in range(self.lanes))
        seed = self.value(f"insertelement {kind} poison, i64 {count}, i64 0")
        counts = self.value(f"shufflevector {kind} {seed}, {kind} poison, <{self.lanes} x i32> zeroinitializer")
        return self.value(f"icmp slt {kind} <{numbers}>, {counts}")

    # Arithmetic on vectors

    def splat(self, scalar: str) -> str:
        """Emit a vector whose elements are all ``scalar``."""
        seed = self.value(f"insertelement {self.vector} poison, {self.scalar} {scalar}, i64 0")
        return self.value(f"shufflevector {self.vector} {seed}, {self.vector} poison, {self._zeros()}")

    def broadcast(self, pointer: str) -> str:
        """Emit a vector whose elements are all the element at ``pointer``."""
        return self.splat(self.scalar_at(pointer))

    def floored(self, a: str, least: str = "zeroinitializer") -> str:
        """Emit max(a, least); NaN stays NaN, and with the default ``least`` -0 becomes 0."""
        keeps = self.value(f"fcmp ugt {self.vector} {a}, {least}")
        return self.value(f"select <{self.lanes} x i1> {keeps}, {self.vector} {a}, {self.vector} {least}")

    def positive(self, a: str) -> str:
        """Emit a vector with 1 in lanes that are positive or NaN, and 0 in other lanes."""
        is_positive = self.value(f"fcmp ugt {self.vector} {a}, zeroinitializer")
        return self.value(f"uitofp <{self.lanes} x i1> {is_positive} to {self.vector}")

    def chosen(self, mask: str, a: str, b: str) -> str:
        """Emit a selection: the elements of ``a`` in lanes whose mask is on, of ``b`` in other lanes."""
        return self.value(f"select <{self.lanes} x i1> {mask}, {self.vector} {a}, {self.vector} {b}")

    def constant(self, number: str) -> str:
        """Return a constant vector whose elements are all ``number``, which is in LLVM's notation."""
        return f"<{', '.join([f'{self.scalar} {number}'] * self.lanes)}>"

    def function(self, name: str, a: str) -> str:
        """Emit the function ``name``, ``sqrt`` or ``fabs``, of every element."""
        return self.value(f"call {self.vector} @llvm.{name}.{self._suffix}({self.vector} {a})")

    def fma(self, a: str, b: str, c: str) -> str:
        """Emit the fused multiply-add ``a * b + c`` of vectors, which rounds once."""
        kind = self.vector
        return self.value(f"call {kind} @llvm.fma.{self._suffix}({kind} {a}, {kind} {b}, {kind} {c})")

    def ordered(self, vector: str, number: Value, register: str) -> tuple[str, str]:
        """Emit an ordering: return both values; uses of the new ``number`` cannot move before ``vector`` is computed.

        The ordering costs no instruction. Without it, the compiler moves loads forward until registers run out.
        ``register`` is :attr:`Target.register <weftplan.kernels.compiled.target.Target.register>`.
        """
        kind = f"{{ {self.vector}, i64 }}"
        pair = self.value(f'call {kind} asm "", "={register},=r,0,1"({self.vector} {vector}, i64 {number})')
        return self.value(f"extractvalue {kind} {pair}, 0"), self.value(f"extractvalue {kind} {pair}, 1")

    def root(self, scalar: str) -> str:
        """Emit the square root of a scalar."""
        return self.value(f"call {self.scalar} @llvm.sqrt.f{8 * self.size}({self.scalar} {scalar})")

    def binary(self, how: str, a: str, b: str) -> str:
        """Emit the operation ``how`` on two vectors: ``fadd``, ``fsub``, ``fmul`` or ``fdiv``."""
        return self.value(f"{how} {self.vector} {a}, {b}")

    def shuffle(self, a: str, b: str, lanes: Sequence[int]) -> str:
        """Emit a vector of the elements at positions ``lanes`` in the concatenation of ``a`` and ``b``."""
        which = ", ".join(f"i32 {lane}" for lane in lanes)
        return self.value(f"shufflevector {self.vector} {a}, {self.vector} {b}, <{len(lanes)} x i32> <{which}>")

    def transposed(self, rows: Sequence[str]) -> list[str]:
        """Emit the transpose of a square matrix of up to ``lanes`` rows; columns of missing rows are undefined."""
        n = self.lanes
        vectors = [*rows, *["poison"] * (n - len(rows))]
        step = n // 2
        while step:
            new = list(vectors)
            for i in range(n):
                if i & step:
                    continue
                a, b = vectors[i], vectors[i | step]
                if a == b == "poison":
                    continue
                new[i] = self.shuffle(a, b, [n + lane - step if lane & step else lane for lane in range(n)])
                new[i | step] = self.shuffle(a, b, [n + lane if lane & step else lane + step for lane in range(n)])
            vectors = new
            step //= 2
        return vectors

    def total(self, vector: str) -> str:
        """Emit the sum of a vector's elements, a scalar; halves are added, in the same order on every machine."""
        step = self.lanes // 2
        while step:
            turned = self.shuffle(vector, "poison", [(lane + step) % self.lanes for lane in range(self.lanes)])
            vector = self.binary("fadd", vector, turned)
            step //= 2
        return self.value(f"extractelement {self.vector} {vector}, i64 0")

    # Control

    @contextlib.contextmanager
    def loop(self, begin: Value, end: Value, step: Value = 1) -> Iterator[str]:
        """Emit ``for i in range(first, end, step)``, of signed 64-bit integers; the ``with`` block emits the body.

        Yield the name of ``i``.
        """
        self._count += 1
        k, entry_block = self._count, self._block
        self.emit(f"br label %head{k}")
        self._label(f"head{k}")
        index = f"%i{k}"
        self.emit(f"{index} = phi i64 [ {begin}, %{entry_block} ], [ %next{k}, %latch{k} ]")
        inside = self.compare("slt", index, end)
        self.emit(f"br i1 {inside}, label %body{k}, label %done{k}")
        self._label(f"body{k}")
        self._loops.append(k)
        yield index
        self._loops.pop()
        self.emit(f"br label %latch{k}")
        self._label(f"latch{k}")
        self.emit(f"%next{k} = add nsw i64 {index}, {step}")
        self.emit(f"br label %head{k}, !llvm.loop !0")
        self._label(f"done{k}")

    def leave(self, condition: str) -> None:
        """Emit a jump out of the innermost loop if the condition is true."""
        self._count += 1
        self.emit(f"br i1 {condition}, label %done{self._loops[-1]}, label %stay{self._count}")
        self._label(f"stay{self._count}")

    @contextlib.contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """Emit ``if condition:``; the ``with`` block emits the body."""
        self._count += 1
        k = self._count
        self.emit(f"br i1 {condition}, label %then{k}, label %after{k}")
        self._label(f"then{k}")
        yield
        self.emit(f"br label %after{k}")
        self._label(f"after{k}")

    def call(self, function: Function, *values: Value) -> None:
        """Emit a call of another function of the module."""
        arguments = ", ".join(f"{kind} {value}" for (kind, _), value in zip(function.arguments, values, strict=True))
        self.emit(f"call void @{function.name}({arguments})")

    def text(self) -> str:
        """Return the text of the function's definition."""
        arguments = ", ".join(f"{kind} %{name}" for kind, name in self.arguments)
        kind = "internal " if self._local else ""
        result, end = ("void", "void") if self.result is None else ("ptr", f"ptr {self.result}")
        head = f"define {kind}{result} @{self.name}({arguments}) #0 {{\nentry:\n"
        return head + "\n".join([*self._entry, *self._lines]) + f"\n  ret {end}\n}}\n"

    def _label(self, name: str) -> None:
        self._lines.append(f"{name}:")
        self._block = name

    def _zeros(self) -> str:
        return f"<{self.lanes} x i32> zeroinitializer"


def module(functions: Sequence[Function], register_bits: int) -> str:
    """Return the text of a module with these functions, for vector registers of ``register_bits`` bits.

    The compiler does not unroll loops of the module, and does not change the rounding of any operation.
    """
    main = functions[0]
    texts = [function.text() for function in functions]
    declared = list(dict.fromkeys(text for function in functions for text in function.declared))
    for lanes, scalar in sorted({(function.lanes, function.scalar) for function in functions}):
        bits = 32 if scalar == "float" else 64
        kind, suffix = f"<{lanes} x {scalar}>", f"v{lanes}f{bits}"
        declared += [
            f"declare {kind} @llvm.fma.{suffix}({kind}, {kind}, {kind})",
            f"declare {kind} @llvm.masked.load.{suffix}.p0(ptr, i32, <{lanes} x i1>, {kind})",
            f"declare void @llvm.masked.store.{suffix}.p0({kind}, ptr, i32, <{lanes} x i1>)",
        ]
        for name in (f"@llvm.{function}.{suffix}" for function in ("fabs", "sqrt")):
            if any(f"{name}(" in text for text in texts):
                declared.append(f"declare {kind} {name}({kind})")
    scalar, bits = main.scalar, 8 * main.size
    declared += [
        f"declare {scalar} @llvm.fma.f{bits}({scalar}, {scalar}, {scalar})",
        f"declare {scalar} @llvm.sqrt.f{bits}({scalar})",
        "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
        "declare i64 @llvm.smin.i64(i64, i64)",
        "declare i64 @llvm.smax.i64(i64, i64)",
        f'attributes #0 = {{ nounwind "prefer-vector-width"="{register_bits}" '
        f'"min-legal-vector-width"="{register_bits}" "no-builtins" }}',
        '!0 = distinct !{!0, !1}\n!1 = !{!"llvm.loop.unroll.disable"}\n!2 = !{i32 1}',
    ]
    return "\n".join([*texts, *declared]) + "\n"
