"""Chunks that are offloaded while memory is short, or hold memory only while it is needed."""
