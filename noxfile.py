# /// script
# dependencies = ["nox>=2025.2.9", "uv>=0.5"]
# ///
"""Everything a developer or CI runs. `nox` alone: all but train, interop, migration, torch, jax, bench and npu."""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "types", "tests", "integration", "docs"]
nox.options.reuse_venv = "yes"

# Each package, and the sister packages that it builds on.
PACKAGES: dict[str, tuple[str, ...]] = {
    "parallel-config": (),
    "device-mesh": ("parallel-config",),
    "mask-compression": (),
    "pipeline-schedule": (),
    "moe-dispatch": ("parallel-config", "device-mesh"),
    "trainer": ("parallel-config", "device-mesh", "mask-compression", "pipeline-schedule", "moe-dispatch"),
}
EXTRAS = {
    "parallel-config": "test",
    "device-mesh": "mpi,mindspore,test",
    "mask-compression": "mindspore,plot,test",
    "pipeline-schedule": "test",
    "moe-dispatch": "mindspore,plot,test",
    "trainer": "test",
}


def install(session: nox.Session, package: str, *requirements: str, extras: str = "") -> None:
    """Install a package of this repository with its sister packages, and more; at the locked versions."""
    # Ranks start together and import MindSpore, which takes three times as long where no bytecode may be written.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    editable = [f"packages/{sister}" for sister in PACKAGES[package]]
    editable.append(f"packages/{package}[{extras}]" if extras else f"packages/{package}")
    arguments = [argument for path in editable for argument in ("-e", path)]
    session.install("-c", "tools/constraints.txt", *arguments, *requirements)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, and import-linter for the layers."""
    install(session, "trainer", "ruff", "import-linter", extras="test")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "tools/layers.toml")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict on the packages below the trainer."""
    install(session, "trainer", "mypy", "types-PyYAML", extras="test")
    for package in PACKAGES:
        session.run("mypy", f"packages/{package}/src")


@nox.session
@nox.parametrize("package", list(PACKAGES), ids=list(PACKAGES))
def tests(session: nox.Session, package: str) -> None:
    """A package's tests, in an environment with only its own dependencies."""
    install(session, package, extras=EXTRAS[package])
    session.run("pytest", f"packages/{package}/tests", *session.posargs)


@nox.session
def integration(session: nox.Session) -> None:
    """Every plan trains as one rank does: the parity matrix, on 1, 2, 4 and 8 ranks."""
    install(session, "trainer", "psutil", extras="test")
    session.run("pytest", "integration_tests", *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """Train a small model on the Python standard library's source on four ranks, and show the loss falling."""
    install(session, "trainer")
    session.run("parallel-train", "data", "build", "--python-stdlib", "--output", "output/python-stdlib")
    session.run("parallel-train", "run", "docs/scenarios/first-run.yaml", "--nproc", "4", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Links lead somewhere, scenario files are valid, the reference of fields is today's."""
    install(session, "parallel-config")
    session.run("python", "tools/check_docs.py")


def install_with_torch(session: nox.Session) -> None:
    """Our packages beside PyTorch and transformers, by pip: uv would fetch PyTorch's CUDA build."""
    install(session, "trainer", "torch==2.13.0", "transformers", extras="test")


@nox.session(venv_backend="venv")
def interop(session: nox.Session) -> None:
    """Hugging Face's models beside ours: logits and gradients, twenty steps of training; their folders, both ways."""
    install_with_torch(session)
    session.run("pytest", "packages/trainer/interop_tests", *session.posargs)


@nox.session(venv_backend="venv")
def migration(session: nox.Session) -> None:
    """Each YAML file of MindFormers' wheels, converted or refused: what docs/migration.md says. Downloads 4 MB."""
    session.install("-e", "packages/parallel-config")
    wheels = Path(session.create_tmp())
    for version in ("2.0.0", "2.1.0"):
        session.run("pip", "download", "--quiet", "--no-deps", f"--dest={wheels}", f"mindformers=={version}")
    session.run("python", "tools/migration_table.py", "--compare", *map(str, sorted(wheels.glob("*.whl"))))


@nox.session(venv_backend="venv")
def torch(session: nox.Session) -> None:
    """mask-compression beside PyTorch and the newest NumPy, by pip, with no other package of this repository."""
    session.install("-e", "packages/mask-compression[plot,test]", "torch==2.13.0")
    folders = [f"packages/mask-compression/{name}" for name in ("tests", "torch_tests")]
    session.run("pytest", *folders, *session.posargs)


@nox.session
def jax(session: nox.Session) -> None:
    """mask-compression's segment ids in JAX's Pallas attention kernels, interpreted on the CPU."""
    session.install("-e", "packages/mask-compression[test]", "jax")
    session.run("pytest", "packages/mask-compression/jax_tests", *session.posargs)


@nox.session(venv_backend="venv")
def bench(session: nox.Session) -> None:
    """Masks, schedules, dispatch, a step and a checkpoint against others', two ranks against one; prints the ratios."""
    install_with_torch(session)
    session.run("python", "packages/mask-compression/benchmarks/masks.py")
    session.run("python", "packages/pipeline-schedule/benchmarks/schedules_vs_torch.py")
    session.run("python", "packages/moe-dispatch/benchmarks/permute_vs_torch.py")
    session.run("python", "packages/trainer/benchmarks/tensor_parallel.py")
    session.run("python", "packages/trainer/benchmarks/checkpoint.py")
    session.run("python", "packages/trainer/benchmarks/step_vs_torch.py", *session.posargs)


@nox.session
def npu(session: nox.Session) -> None:
    """On Ascend NPUs: tests of what is written for them, plans and scenarios against one rank. Never run yet."""
    wheel = os.environ.get("HYPER_PARALLEL_WHEEL", "")
    npus = len(list(Path("/dev").glob("davinci[0-9]*")))
    needed = {
        "NPUs (/dev/davinci0)": npus > 0,
        "CANN's environment (ASCEND_HOME_PATH)": "ASCEND_HOME_PATH" in os.environ,
        "a wheel of HyperParallel in HYPER_PARALLEL_WHEEL": Path(wheel).is_file(),
    }
    missing = [what for what, there in needed.items() if not there]
    if missing:
        session.error(f"This session needs {', '.join(missing)}; docs/ascend.md has more")
    install(session, "trainer", wheel, extras="test")
    for package in ("device-mesh", "trainer"):
        session.run("pytest", f"packages/{package}/tests", *session.posargs)
    world_size = max(ranks for ranks in (1, 2, 4, 8) if ranks <= npus)
    scenarios = ["--scenarios"] if world_size == 8 else []
    compare = ("python", "integration_tests/on_devices.py", "--device", "ascend", "--world-size", str(world_size))
    for engine in ("native", "hyperparallel") if world_size > 1 else ("native",):
        for dtype in ("float32", "bfloat16"):
            session.run(*compare, "--engine", engine, "--dtype", dtype, *scenarios)
    if not scenarios:
        session.warn(f"The specification's scenarios were not trained: they need 8 NPUs, and here are {npus}.")
    if world_size == 1:
        session.warn("HyperParallel trained nothing: it splits work over NPUs, and here is one.")
