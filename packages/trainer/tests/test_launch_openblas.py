"""The core type that OpenBLAS is told: what the processor has, unless the user chose."""

from __future__ import annotations

import pytest
from parallel_trainer.launch.openblas import openblas_environment

AVX2 = "processor : 0\nflags\t\t: fpu sse2 ssse3 fma avx avx2\nbugs\t\t: none\n"
AVX512 = AVX2.replace("avx2", "avx2 avx512f avx512dq avx512cd avx512bw avx512vl")


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (AVX512, {"OPENBLAS_CORETYPE": "SkylakeX"}),
        (AVX2, {"OPENBLAS_CORETYPE": "Haswell"}),
        (AVX512.replace("avx512vl", ""), {"OPENBLAS_CORETYPE": "Haswell"}),
        ("flags : fpu sse2", {}),
        ("Features : asimd", {}),
        ("", {}),
    ],
)
def test_the_best_core_type_the_instructions_allow(cpuinfo, expected):
    assert openblas_environment({"PATH": "/bin"}, cpuinfo=cpuinfo) == expected


def test_the_users_choice_stands():
    assert openblas_environment({"OPENBLAS_CORETYPE": "Zen"}, cpuinfo=AVX512) == {}
