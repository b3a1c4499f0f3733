"""Errors say what happened, why, and what to type; they are caught by those who never heard of kalign."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from kalign_core import errors
from kalign_core.errors import BadArgument, KalignError, MissingEntry, MixedDevices, UnknownName

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, KalignError)]


def test_the_message_has_three_parts() -> None:
    """What happened comes first, then the rule, then what to type."""
    error = BadArgument("rows=0", why="a kernel needs rows", fix="rows=1")
    assert str(error) == "rows=0\n  why: a kernel needs rows\n  try: rows=1"
    assert (error.what, error.why, error.fix) == ("rows=0", "a kernel needs rows", "rows=1")


def test_absent_parts_leave_no_line() -> None:
    """An error without a rule or a remedy is one line."""
    assert str(KalignError("lost")) == "lost"


def test_a_misspelt_name_is_guessed() -> None:
    """An unknown name close to a known one gets that one as its remedy."""
    error = UnknownName("operator", "rmsnorm", ["swiglu", "rms_norm"])
    assert error.fix == "did you mean 'rms_norm'?"
    assert "swiglu, rms_norm" in error.why


def test_a_strange_name_gets_the_list() -> None:
    """An unknown name close to nothing gets all that are known."""
    assert UnknownName("mode", "zzz", ["off", "tune"]).fix == "use one of: off, tune"


def test_nothing_known_is_said() -> None:
    """Where no name is known the message does not end in nothing."""
    assert "(none)" in str(UnknownName("store", "s3", []))


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (UnknownName, ValueError),
        (BadArgument, ValueError),
        (MixedDevices, ValueError),
        (errors.DeclarationError, TypeError),
        (errors.NoPlatform, RuntimeError),
        (errors.NoSecondDerivative, RuntimeError),
        (errors.CandidateFailed, RuntimeError),
        (MissingEntry, LookupError),
        (errors.MissingPackage, ImportError),
    ],
)
def test_errors_are_what_a_caller_expects(kind: type, builtin: type) -> None:
    """Every class derives from the built-in exception for its kind of fault, and from kalign's own."""
    assert issubclass(kind, builtin)
    assert issubclass(kind, KalignError)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(UnknownName, 2), (BadArgument, 2), (errors.NoPlatform, 3), (MissingEntry, 4), (errors.DeviceLost, 1)],
)
def test_exit_codes(kind: type[KalignError], code: int) -> None:
    """Usage is 2, no platform 3, a missing entry 4, everything else 1."""
    assert kind.exit_code == code


@pytest.mark.parametrize(
    "error",
    [
        BadArgument("rows=0", why="a rule", fix="rows=1"),
        UnknownName("mode", "x", ["off"], fix="off"),
        MissingEntry("no entry", fix="kalign tune"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("carry", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_errors_cross_processes(error: KalignError, carry: object) -> None:
    """What a data loader's worker raised arrives with its text and its fields."""
    again = carry(error)  # type: ignore[operator]
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_says_what_it_means(kind: type) -> None:
    """Each class is documented by itself."""
    assert "__doc__" in vars(kind)
    assert str(kind.__doc__).strip().endswith(".") or "\n" in str(kind.__doc__)
