"""The memory of arrays: chunks, their release, and joint allocation."""
