"""The training loop and what accompanies it: checkpoints, callbacks, events, early stopping."""
