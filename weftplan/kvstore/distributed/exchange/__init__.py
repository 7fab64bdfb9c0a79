"""Exchanges between processes as engine operations: tickets, bucket operations, and the sequencer that orders them."""
