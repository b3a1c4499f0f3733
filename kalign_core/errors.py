"""Every exception that kalign raises on purpose.

One file, so that a reader can see what may go wrong; each class says what happened with which values, why, and what
to type next. The classes also derive from the built-in exception a caller would expect, so that code which never heard
of kalign catches them. Imports nothing but the standard library.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any


class KalignError(Exception):
    """Base of all errors of kalign.

    ``what`` says what happened with which values, ``why`` the rule behind it, ``fix`` what to type.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        lines = [what]
        if why:
            lines.append(f"  why: {why}")
        if fix:
            lines.append(f"  try: {fix}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Errors cross processes: data loaders and process pools pickle what a worker raised."""
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[KalignError], args: tuple[Any, ...]) -> KalignError:
    made = kind.__new__(kind)
    made.args = args
    return made


class UnknownName(KalignError, ValueError):
    """A name that kalign does not know: an operator, knob, phase, mode, dimension, dtype, kernel, store, strategy."""

    exit_code = 2

    def __init__(self, noun: str, name: object, known: Iterable[str], *, fix: str = "") -> None:
        self.noun, self.name, self.known = noun, name, tuple(known)
        close = difflib.get_close_matches(str(name), self.known, n=1)
        guess = f"did you mean {close[0]!r}?" if close else f"use one of: {', '.join(self.known) or '(none)'}"
        super().__init__(
            f"unknown {noun} {name!r}",
            why=f"the {noun} is one of: {', '.join(self.known) or '(none)'}",
            fix=f"{guess} Otherwise: {fix}" if close and fix else fix or guess,
        )


class BadArgument(KalignError, ValueError):
    """A value of the right kind that cannot be used: a rank, a size, a dtype, a stride, an option's value."""

    exit_code = 2


class MixedDevices(BadArgument):
    """Tensors of one call that live on different devices, or on a device the selected platform does not serve."""


class DeclarationError(KalignError, TypeError):
    """A kernel or operator whose declaration contradicts itself; raised where it is declared."""


class NoSecondDerivative(KalignError, RuntimeError):
    """A gradient of an operator that was to be differentiated once more."""


class NoPlatform(KalignError, RuntimeError):
    """No platform can be used here, or the one that was asked for cannot."""

    exit_code = 3


class MissingPackage(KalignError, ImportError):
    """A package that kalign does without, and this part of it cannot."""


class PluginFault(KalignError, RuntimeError):
    """A plugin that could not be loaded or broke the contract; raised only under ``KALIGN_STRICT=1``."""


class MissingEntry(KalignError, LookupError):
    """Mode ``frozen`` met a problem that no entry of the device's file answers."""

    exit_code = 4


class NotTunable(KalignError, RuntimeError):
    """A kernel that must not be tuned: its reference disagrees with itself, or writes what it did not declare."""


class NotNow(NotTunable):
    """The moment was wrong to tune a kernel: says nothing of the kernel, and another time it may go well."""


class NoMemory(NotNow):
    """Memory ran out while a kernel was tuned."""


class CandidateFailed(KalignError, RuntimeError):
    """A launch that did not compile or run; reaches a caller only where it is the reference that fails."""


class DeviceLost(KalignError, RuntimeError):
    """The device is in a state that no further launch survives; tuning stops, the process should be restarted."""
