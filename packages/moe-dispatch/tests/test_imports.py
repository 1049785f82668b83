"""Importing the package loads neither MindSpore nor MPI nor Matplotlib."""

from __future__ import annotations

import subprocess
import sys


def test_imports_stay_light() -> None:
    program = "import sys, moe_dispatch; print(*{'mindspore', 'mpi4py', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
