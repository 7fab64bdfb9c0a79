"""The group of processes that share a store: membership, messages, sums and broadcasts."""
