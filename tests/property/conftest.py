"""Lets the property tests import their models, and registers the profile of the long run."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# `make test-long`: other examples each time, about 100 times as many.
settings.register_profile("long", derandomize=False, deadline=None)
