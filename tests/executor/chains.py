"""Executors of a few large arrays, and the bytes in use on a context, for tests of pools."""

import gc

import weftplan as mx
from weftplan import planner, storage


def chain(size, ctx, shared=None, **options):
    """Return an executor of ``sqrt(exp(data)) ** 2``, whose planned arrays have ``size`` floats and share no memory.

    ``shared`` is an executor whose pool is shared, or None.
    """
    net = mx.sym.square(mx.sym.sqrt(mx.sym.exp(mx.sym.Variable("data"))))
    chosen = planner.PlanOptions.from_environment(strategy="none", enable_inplace=False, **options)
    return net.simple_bind(ctx, data=(size,), grad_req="null", shared_exec=shared, plan_options=chosen)


def held_bytes(ctx):
    """Return the bytes that storage has given out on ``ctx``, after all dead arrays have been freed."""
    # Reference cycles do not count, because they are collected before an allocation fails. Without a GIL, an object
    # that a worker created and another thread dropped is freed when that worker wakes.
    gc.collect()
    for _ in range(4):  # freeing a chunk may free its block in the next drain
        mx.nd.zeros((1,), ctx=ctx).wait_to_read()
        mx.nd.waitall()
    return storage.get(ctx).statistics().requested_bytes
