"""The processes that share a store: membership, the messages between them, sums and broadcasts."""
