"""Lets the tests import the slow masks that they compare with."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
