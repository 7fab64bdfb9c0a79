"""Training: Module, optimizers, initializers, metrics, data iterators, callbacks.

What is here runs on the thread that calls it and leaves the work to executors and stores, which push it to the
engine.
"""
