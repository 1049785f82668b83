# /// script
# dependencies = ["nox>=2025.2.9", "uv>=0.5"]
# ///
"""Everything a developer or CI runs. `nox` alone: lint, types, the tests of each package, integration."""

from __future__ import annotations

from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "types", "tests", "integration"]
nox.options.reuse_venv = "yes"

# Lowest first: a package may use those before it.
PACKAGES = ("parallel-config", "device-mesh", "trainer")
EXTRAS = {"parallel-config": "test", "device-mesh": "mpi,mindspore,test", "trainer": "test"}
CONSTRAINTS = "tools/constraints.txt"


def install(session: nox.Session, last: str, *requirements: str, extras: str | None = None) -> None:
    """Install a package of this repository and the sister packages it builds on, at the locked versions."""
    session.env["UV_LINK_MODE"] = "hardlink"
    arguments: list[str] = []
    for package in PACKAGES[: PACKAGES.index(last) + 1]:
        wanted = (extras or EXTRAS[package]) if package == last else None
        arguments += ["-e", f"packages/{package}[{wanted}]" if wanted else f"packages/{package}"]
    session.install("-c", CONSTRAINTS, *arguments, *requirements)


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
    session.run("pytest", f"packages/{package}", *session.posargs)


@nox.session
def integration(session: nox.Session) -> None:
    """Every plan trains as one rank does: the parity matrix, on 1, 2, 4 and 8 ranks."""
    install(session, "trainer")
    session.run("pytest", "integration_tests", *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """Train a small model on the Python standard library's source on four ranks, and show the loss falling."""
    install(session, "trainer", extras="")
    session.run("parallel-train", "data", "build", "--python-stdlib", "--output", "output/python-stdlib")
    session.run("parallel-train", "run", "docs/scenarios/first-run.yaml", "--nproc", "4", *session.posargs)


@nox.session(venv_backend="venv")
def interop(session: nox.Session) -> None:
    """The same weights in Hugging Face's Qwen3 and in ours: logits, loss and gradients."""
    session.install("torch==2.13.0", "transformers")
    session.install("-c", CONSTRAINTS, *(part for package in PACKAGES for part in ("-e", f"packages/{package}")))
    session.run("pytest", "packages/trainer/interop_tests", *session.posargs)


@nox.session
def npu(session: nox.Session) -> None:
    """Says what it needs: nothing in this repository has run on an Ascend NPU yet."""
    if not any(Path("/dev").glob("davinci*")):
        session.error("This session needs a machine with Ascend NPUs (/dev/davinci*), and there is none here.")
    session.error("There are NPUs here, but no kernels or communicator for them in this version yet.")
