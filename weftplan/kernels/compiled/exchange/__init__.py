"""Compiled loops of the kvstore: sums, copies, polling of shared memory and packing of gradients."""
