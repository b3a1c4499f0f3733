"""The project's sessions. ``nox -s demo`` runs the main job, ``nox -s tests`` the tests; ``nox -l`` lists the rest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "virtualenv"  # pip, so that the wheels it is configured to find are found
nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True
PROJECT = nox.project.load_toml("pyproject.toml")


def group(name: str) -> list[str]:
    return nox.project.dependency_groups(PROJECT, name)


@nox.session
def demo(session: nox.Session) -> None:
    """Tune the shared operators on the platform at hand and say where the decisions are; again, everything is a hit."""
    session.install(*group("cpu"), "-e", ".")
    session.run("kalign", "tune", *session.posargs)
    session.run("kalign", "tune", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The tests that need no GPU: interpreter, scripted platform, real compiles."""
    session.install(*group("test"), "-e", ".")
    session.run("pytest", "-q", *(session.posargs or ["tests"]), env={"KALIGN_MODE": "", "KALIGN_PLATFORM": ""})


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and formatting."""
    session.install(*group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict."""
    session.install(*group("types"), "-e", ".")
    session.run("mypy")


@nox.session
def layers(session: nox.Session) -> None:
    """import-linter: who may import whom."""
    session.install(*group("layers"), "-e", ".")
    session.run("lint-imports")


@nox.session
def build(session: nox.Session) -> None:
    """Wheel and source distribution, and that the wheel holds the three packages and nothing else."""
    session.install(*group("build"))
    session.run("python", "-m", "build", "--no-isolation", "--outdir", session.create_tmp())


def vendor(session: nox.Session, name: str, needs: str) -> None:
    """Vendor sessions use the interpreter nox was started from: torch there is the vendor's."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    probe = "from kalign_core import hal; print(hal.selection.chosen, '-', hal.selection.why)"
    found = str(
        session.run(sys.executable, "-c", probe, external=True, success_codes=[0, 1], silent=True, env=environment)
    )
    if not found.startswith(f"{name} "):
        session.skip(f"needs {needs} and a torch built for it in {sys.executable}; there: {found.strip()}")
    arguments = session.posargs or [f"tests/{name}"]
    session.run(sys.executable, "-m", "pytest", "-q", *arguments, external=True, env=environment)


@nox.session(venv_backend="none")
def tests_cuda(session: nox.Session) -> None:
    """The tests on an NVIDIA GPU, with the torch of the interpreter nox runs in; two GPUs show more than one."""
    vendor(session, "cuda", "an NVIDIA GPU")


@nox.session(venv_backend="none")
def tests_rocm(session: nox.Session) -> None:
    """The tests on an AMD GPU, with the torch of the interpreter nox runs in."""
    vendor(session, "rocm", "an AMD GPU")


TARGETS = "from kalign_core import hal; from kalign_core.tuner import targets; print(*targets.targets(hal.plugins))"


def compile_for(session: nox.Session, backend: str) -> None:
    """Compile every candidate of every operator (or of those given) for each device of ``backend``; needs no device."""
    session.install(*group("cpu"), "-e", ".")
    printed = str(session.run("python", "-c", TARGETS, silent=True))
    targets = [word for word in printed.split() if word.startswith(f"{backend}:")]
    if not targets:
        session.skip(f"needs a plugin that knows {backend} devices; `kalign plugins` shows which are broken")
    for target in targets:
        session.run("python", "-m", "kalign_core", "compile", *session.posargs, "--target", target)


@nox.session
def compile_cuda(session: nox.Session) -> None:
    """Every candidate compiled for every NVIDIA architecture, without a device; takes minutes for each."""
    compile_for(session, "cuda")


@nox.session
def compile_rocm(session: nox.Session) -> None:
    """Every candidate compiled for every AMD architecture, without a device; takes minutes for each."""
    compile_for(session, "hip")


@nox.session
def tests_thirdparty(session: nox.Session) -> None:
    """Every example backend, installed beside kalign as anybody's would be, held to the conformance suites."""
    examples = sorted(path.parent for path in Path("examples").glob("*/pyproject.toml"))
    if not examples:
        session.skip("needs a backend below examples/, which this copy of the sources lacks")
    session.install(*group("test"), "-e", ".")
    session.install(*(f"./{example}" for example in examples))
    for example in examples:
        session.run("pytest", "-q", *session.posargs, str(example))
    session.run("pytest", "-q", *session.posargs, "tests/conformance", env={"KALIGN_MODE": "", "KALIGN_PLATFORM": ""})
