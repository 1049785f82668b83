"""Lets the tests import the models that they compare, and starts MindSpore once for all of them."""

from __future__ import annotations

import sys
from pathlib import Path

from parallel_trainer.device import start_mindspore

sys.path.append(str(Path(__file__).parent))
start_mindspore("cpu")  # MindSpore takes this before its first operator alone
