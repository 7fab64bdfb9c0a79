"""Executors of a few large arrays, and the bytes that they hold: for the tests of pools."""

import gc

import weftplan as mx
from weftplan import planner, storage


def chain(size, ctx, shared=None, **options):
    """Return an executor of ``sqrt(exp(data)) ** 2``: planned arrays of ``size`` floats."""
    net = mx.sym.square(mx.sym.sqrt(mx.sym.exp(mx.sym.Variable("data"))))
    chosen = planner.PlanOptions.from_environment(strategy="none", enable_inplace=False, **options)
    return net.simple_bind(ctx, data=(size,), grad_req="null", shared_exec=shared, plan_options=chosen)


def held_bytes(ctx):
    """Return the bytes that storage has given out on ``ctx``, once everything dead has been handed back."""
    # Cycles are collected before memory is said to have run out, so they must not count either. And without a GIL
    # what a worker made and another thread dropped last would go when that worker next wakes.
    gc.collect()
    for _ in range(4):  # a chunk's release may let go of its block, whose release comes a drain later
        mx.nd.zeros((1,), ctx=ctx).wait_to_read()
        mx.nd.waitall()
    return storage.get(ctx).statistics().requested_bytes
