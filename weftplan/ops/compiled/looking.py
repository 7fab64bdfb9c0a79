"""Looks at a word of memory, again and again for a while, without the interpreter.

A thread that sleeps until another one wakes it goes on some 40 microseconds later; who looks goes on at once. Others
may have the core between looks, so that little is taken from a thread that has something to do.
"""

from __future__ import annotations

import functools
import os

from weftplan.ops.compiled.ir import Function
from weftplan.ops.compiled.jit import Entry, library
from weftplan.ops.compiled.target import host

_OLD, _TURNS, _PAUSES = range(1, 4)
"""Words of a call, behind the one that is looked at: what it was; turns of :data:`_LOOKS` looks, after each of which
others may have the core; pauses after a change."""
_LOOKS = 32


def look() -> Entry | None:
    """What returns when a word has changed and some pauses are over, or when its turns are over; None while nobody has
    asked for a compiler, which takes a while to import, or where there is none."""
    return _entry() if host.cache_info().currsize else None


@functools.cache
def _entry() -> Entry | None:
    target = host()
    if isinstance(target, str) or target.bits < 256 or not hasattr(os, "sched_yield"):
        return None
    return library("looking", lambda _: [_function()], ("looking",))["looking"]


def _function() -> Function:
    f = Function("looking", (("ptr", "words"),), "float", 8)
    f.declare("declare void @llvm.x86.sse2.pause()")
    f.declare("declare i32 @sched_yield()")
    old, turns, pauses = (f.word("%words", index) for index in (_OLD, _TURNS, _PAUSES))
    with f.when(f.compare("eq", _seen(f), old)):
        with f.loop(0, turns):
            with f.loop(0, _LOOKS):
                f.leave(f.compare("ne", _seen(f), old))
                f.emit("call void @llvm.x86.sse2.pause()")
            f.leave(f.compare("ne", _seen(f), old))
            f.value("call i32 @sched_yield()")
        with f.loop(0, pauses):
            f.emit("call void @llvm.x86.sse2.pause()")
    return f


def _seen(f: Function) -> str:
    return f.value("load atomic i64, ptr %words acquire, align 8")
