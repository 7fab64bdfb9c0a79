"""What holds for all tests."""

collect_ignore_glob = ["golden/*.py", "*/golden/*.py"]
"""Scripts that make golden files; they run with MXNet's interpreter, not under pytest."""
