"""Exchanges as engine operations: tickets, bucket operations, and the thread that orders them."""
