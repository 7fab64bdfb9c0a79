"""The training loop of ``fit``, with checkpoints, callbacks, events and early stopping."""
