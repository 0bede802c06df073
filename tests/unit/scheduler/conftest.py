"""Lets the tests import their virtual cluster."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
