"""Spilling: forward results that wait on the host, in a file or on another device for the backward part."""
