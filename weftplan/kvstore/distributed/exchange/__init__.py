"""Exchanges as engine operations: tickets, the operation of a bucket, and the thread that orders them."""
