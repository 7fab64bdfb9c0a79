"""The memory under arrays: chunks, their release, and joint allocation."""
