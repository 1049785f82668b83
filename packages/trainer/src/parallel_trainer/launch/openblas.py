"""The processor that NumPy's OpenBLAS should take this machine for, where it would guess wrong.

The OpenBLAS inside NumPy 1.26 (0.3.23) takes an x86-64 processor newer than itself for a "Prescott" of 2004,
without AVX, and its matrix products are then several times slower than the machine allows. OpenBLAS reads the
environment when NumPy is imported, so the variable has to be there before: in the environment of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_VARIABLE = "OPENBLAS_CORETYPE"
# Instructions that the kernels of a core type use, best first.
_CORE_TYPES = {
    "SkylakeX": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "fma"},
    "Haswell": {"avx2", "fma"},
}


def openblas_environment(environment: Mapping[str, str], *, cpuinfo: str | None = None) -> dict[str, str]:
    """Variables to add to `environment` for a process that will import NumPy; none if the user has chosen.

    cpuinfo: text of /proc/cpuinfo; None reads it, and finds nothing on a system without one.

    >>> openblas_environment({}, cpuinfo="flags : fpu sse2 fma avx2")
    {'OPENBLAS_CORETYPE': 'Haswell'}
    >>> openblas_environment({"OPENBLAS_CORETYPE": "Zen"}, cpuinfo="flags : fpu sse2 fma avx2")
    {}
    """
    if _VARIABLE in environment:
        return {}
    if cpuinfo is None:
        source = Path("/proc/cpuinfo")
        cpuinfo = source.read_text() if source.exists() else ""
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    available = set(flags.partition(":")[2].split())
    for core_type, needed in _CORE_TYPES.items():
        if needed <= available:
            return {_VARIABLE: core_type}
    return {}
