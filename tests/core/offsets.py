"""Which numbers on the way to an address may leave 32 bits, read from a kernel's first intermediate form.

Every integer is followed as the range it can have, from the values of the arguments and the size of the grid. Where an
operation on 32 bits can give more than they hold, and an address is computed from it, the kernel reads or writes
elsewhere. What is not understood counts as any number of its type, so that it is reported rather than passed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Range = tuple[int, int]

_OPERATION = re.compile(r'^(?:(%[\w-]+)(?::\d+)? = )?"?([a-z]+\.[a-z_.]+)"?(.*)$')
_PLACE = re.compile(r" ?loc\((?:[^()]|\([^()]*\))*\)")
_NAME = re.compile(r"%[\w-]+")
_ARGUMENT = re.compile(r"(%[\w-]+): i(?:32|64)")
# The last type of a line is its result's.
_TYPE = re.compile(r"\b(?:tensor<[0-9x]+x)?i(\d+)\b>?")
_COPIES = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "arith.extsi", "arith.extui", "arith.trunci")
_EXACT = ("arith.addi", "arith.subi", "arith.muli")


def too_wide(ttir: str, arguments: Mapping[str, int], grid: Sequence[int]) -> list[str]:
    """Lines of ``ttir`` whose 32-bit result may overflow and reaches an address, for integer ``arguments`` by name."""
    reading = _Reading(dict(arguments), [*grid, 1, 1])
    for line in ttir.splitlines():
        reading.read(_PLACE.sub("", line).strip())
    reached = _closure(reading.addresses, reading.sources)
    return [line for name, line in reading.suspects.items() if name in reached]


def _closure(names: Iterable[str], sources: Mapping[str, set[str]]) -> set[str]:
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += sources.get(name, ())
    return found


def _full(bits: int) -> Range:
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


@dataclass
class _Reading:
    """What is known so far: ranges and sources of values, by name; addresses' offsets; operations that may overflow."""

    arguments: dict[str, int]
    grid: list[int]
    ranges: dict[str, Range] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)
    suspects: dict[str, str] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    open: list[set[str]] = field(default_factory=list)

    def read(self, text: str) -> None:
        if text.startswith("tt.func"):
            for name in _ARGUMENT.findall(text):
                value = self.arguments[name[1:]]
                self.ranges[name] = (value, value)
        match = _OPERATION.match(text)
        if match:
            self._operation(match.group(1), match.group(2), match.group(3), text)
        self._regions(text, match.group(1) if match else None)

    def _operation(self, result: str | None, kind: str, rest: str, text: str) -> None:
        operands = _NAME.findall(rest)
        if kind == "tt.addptr":
            self.addresses.append(operands[1])
        if kind == "scf.yield":
            for name in self.open[-1]:
                self.sources.setdefault(name, set()).update(operands)
        if kind == "scf.for":  # `%i = %low to %high step %step`
            low, high = (self._range(name, 64) for name in operands[1:3])
            self.ranges[operands[0]] = (low[0], max(low[0], high[1] - 1))
        if result is None:
            return
        self.sources.setdefault(result, set()).update(operands)
        types = _TYPE.findall(rest)
        if types and not kind.startswith("scf."):
            self._result(result, kind, rest, operands, int(types[-1]), text)

    def _result(self, name: str, kind: str, rest: str, operands: list[str], bits: int, text: str) -> None:
        found, full = self._of(kind, rest, [self._range(operand, bits) for operand in operands]), _full(bits)
        if found is None:
            self.ranges[name] = full
        elif kind in _EXACT and bits == 32 and not full[0] <= found[0] <= found[1] <= full[1]:
            self.ranges[name], self.suspects[name] = full, text
        else:
            self.ranges[name] = max(found[0], full[0]), min(found[1], full[1])

    def _range(self, name: str, bits: int) -> Range:
        return self.ranges.get(name, _full(bits))

    def _of(self, kind: str, rest: str, given: list[Range]) -> Range | None:
        """The range of an operation's result, None where it can be anything."""
        if kind == "tt.get_program_id":
            return 0, self.grid["xyz".index(rest.split()[0])] - 1
        if kind == "tt.make_range":
            end, start = (int(re.search(rf"{word} = (\d+)", rest).group(1)) for word in ("end", "start"))  # type: ignore[union-attr]  # it has both
            return start, end - 1
        if kind == "arith.constant":
            number = re.match(r" (?:dense<)?(-?\d+)>? :", rest)
            return (int(number.group(1)),) * 2 if number else None
        if kind in _COPIES:
            return given[0]
        return _computed(kind, given)

    def _regions(self, text: str, result: str | None) -> None:
        """Keep what the regions that are open here give their values to."""
        for _ in range(text.count("}") - text.count("{")):
            self.open.pop()
        if text.count("{") > text.count("}"):
            carried = re.findall(r"(%[\w-]+) = (%[\w-]+)[,)]", text)
            for name, first in carried:
                self.sources.setdefault(name, set()).add(first)
            self.open.append({name for name, _ in carried} | ({result} if result else set()))


def _computed(kind: str, given: list[Range]) -> Range | None:
    if kind == "arith.select":
        given = given[1:]
        return min(low for low, _ in given), max(high for _, high in given)
    if len(given) != 2:
        return None
    (a, b), (c, d) = given
    if kind == "arith.addi":
        return a + c, b + d
    if kind == "arith.subi":
        return a - d, b - c
    if kind == "arith.muli":
        corners = (a * c, a * d, b * c, b * d)
        return min(corners), max(corners)
    if kind in ("arith.minsi", "arith.maxsi"):
        pick = min if kind == "arith.minsi" else max
        return pick(a, c), pick(b, d)
    if kind == "arith.divsi" and a >= 0 and c > 0:
        return a // d, b // c
    if kind == "arith.remsi" and a >= 0 and c > 0:
        return 0, min(b, d - 1)
    return None
