"""For every test."""

import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

# The same examples each time, and no example has a time limit: a busy machine fails no test.
# `make test-long` searches on with a profile of its own.
settings.register_profile(
    "usual", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("usual")

# Where there is no GPU, Triton's kernels are tested in its interpreter. Triton reads this once.
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def logging_is_left_as_it_was() -> Iterator[None]:
    """Commands configure logging for their process; here many run in one."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
