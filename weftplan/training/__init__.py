"""Training: Module, optimizers, initializers, metrics, data iterators, callbacks."""
