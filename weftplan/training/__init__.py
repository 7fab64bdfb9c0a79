"""Training: Module, optimizers, initializers, metrics, data iterators, callbacks.

The code runs inline on the calling thread. Executors and stores push the computation to the engine.
"""
