"""What holds for all tests."""

from hypothesis import HealthCheck, settings

settings.register_profile("weftplan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weftplan")
"""No limit of time for one example: on a loaded machine a test must not fail for being slow."""

collect_ignore_glob = ["golden/*.py", "*/golden/*.py"]
"""Scripts that make golden files; they run with MXNet's interpreter, not under pytest."""
