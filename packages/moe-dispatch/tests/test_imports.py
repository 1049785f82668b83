"""Importing the package loads neither MindSpore nor MPI nor Matplotlib."""

from __future__ import annotations

import subprocess
import sys


def test_imports_stay_light() -> None:
    program = "import sys, moe_dispatch; print(*{'mindspore', 'mpi4py', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['mindspore'] = None; import moe_dispatch.mindspore"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs MindSpore, which is not installed: pip install 'moe-dispatch[mindspore]'" in done.stderr
