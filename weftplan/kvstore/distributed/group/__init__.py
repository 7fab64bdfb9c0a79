"""The processes that share a store: membership, messages, sums and broadcasts."""
