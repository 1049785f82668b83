# /// script
# dependencies = ["nox>=2025.2.9", "uv>=0.5"]
# ///
"""Everything a developer or CI runs. `nox` alone: all but train, interop, bench and npu."""

from __future__ import annotations

from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "types", "tests", "integration", "docs"]
nox.options.reuse_venv = "yes"

# Lowest first: a package may use those before it.
PACKAGES = ("parallel-config", "device-mesh", "trainer")
EXTRAS = {"parallel-config": "test", "device-mesh": "mpi,mindspore,test", "trainer": "test"}


def install(session: nox.Session, last: str, *requirements: str, tests: bool = True) -> None:
    """Install a package of this repository, the sister packages it builds on, and more; at the locked versions."""
    # Ranks start together and import MindSpore, which takes three times as long where no bytecode may be written.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    packages: list[str] = []
    for package in PACKAGES[: PACKAGES.index(last) + 1]:
        extras = f"[{EXTRAS[package]}]" if package == last and tests else ""
        packages += ["-e", f"packages/{package}{extras}"]
    session.install("-c", "tools/constraints.txt", *packages, *requirements)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, and import-linter for the layers."""
    install(session, "trainer", "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--config", "tools/layers.toml")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict on the packages below the trainer."""
    install(session, "trainer", "mypy", "types-PyYAML")
    session.run("mypy", "packages/parallel-config/src", "packages/device-mesh/src")
    session.run("mypy", "packages/trainer/src")


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """A package's tests, in an environment with only its own dependencies."""
    install(session, package)
    session.run("pytest", f"packages/{package}/tests", *session.posargs)


@nox.session
def integration(session: nox.Session) -> None:
    """Every plan trains as one rank does: the parity matrix, on 1, 2, 4 and 8 ranks."""
    install(session, "trainer", "psutil")
    session.run("pytest", "integration_tests", *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """Train a small model on the Python standard library's source on four ranks, and show the loss falling."""
    install(session, "trainer", tests=False)
    session.run("parallel-train", "data", "build", "--python-stdlib", "--output", "output/python-stdlib")
    session.run("parallel-train", "run", "docs/scenarios/first-run.yaml", "--nproc", "4", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Links lead somewhere, scenario files are valid."""
    install(session, "parallel-config")
    session.run("python", "tools/check_docs.py")


def install_with_torch(session: nox.Session) -> None:
    """Our packages beside PyTorch and transformers, by pip: uv would fetch PyTorch's CUDA build."""
    install(session, "trainer", "torch==2.13.0", "transformers")


@nox.session(venv_backend="venv")
def interop(session: nox.Session) -> None:
    """The same weights in Hugging Face's Qwen3 and in ours: logits, loss and gradients."""
    install_with_torch(session)
    session.run("pytest", "packages/trainer/interop_tests", *session.posargs)


@nox.session(venv_backend="venv")
def bench(session: nox.Session) -> None:
    """A training step against PyTorch's, in turns; prints the ratio."""
    install_with_torch(session)
    session.run("python", "packages/trainer/benchmarks/step_vs_torch.py", *session.posargs)


@nox.session
def npu(session: nox.Session) -> None:
    """Says what it needs: nothing in this repository has run on an Ascend NPU yet."""
    if not any(Path("/dev").glob("davinci*")):
        session.error("This session needs a machine with Ascend NPUs (/dev/davinci*), and there is none here.")
    session.error("There are NPUs here, but no kernels or communicator for them in this version yet.")
