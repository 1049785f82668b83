"""What importing the package costs."""

from __future__ import annotations

import subprocess
import sys

import mask_compression
import pytest

PROGRAM = """
import sys
import mask_compression{names}
tops = {{name.partition(".")[0] for name, module in list(sys.modules.items()) if getattr(module, "__file__", None)}}
print(*sorted(tops - sys.stdlib_module_names - {{"__main__"}}))
"""
CORE = ("ascend", "attention", "cli", "flash_attn", "pallas", "tiles")


def test_the_core_imports_numpy_and_the_standard_library_only() -> None:
    names = "".join(f", mask_compression.{name}" for name in CORE)
    # -S: no start-up files of the environment, whose imports would be taken for ours.
    paths = f"import sys; sys.path[:0] = {[path for path in sys.path if path]!r}"
    command = [sys.executable, "-S", "-c", paths + PROGRAM.format(names=names)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["mask_compression", "numpy"]


def test_public_names_exist() -> None:
    assert all(hasattr(mask_compression, name) for name in mask_compression.__all__)
    assert mask_compression.__all__ == sorted(mask_compression.__all__)


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [("flex_attention", "torch", "torch"), ("mindspore", "mindspore", "mindspore"), ("picture", "matplotlib", "plot")],
)
def test_a_missing_extra_is_named(module: str, library: str, extra: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; import mask_compression.{module} as found\n"
    if module == "picture":  # which the command imports, and needs to draw alone
        code += "from mask_compression.cli import main\n"
        code += "raise SystemExit(main(['show', '--lengths', '5', '--svg', 'a.svg']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    assert f"pip install 'mask-compression[{extra}]'" in done.stderr
