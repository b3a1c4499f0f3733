"""The frozen values that cross module borders: configurations, problems, devices, entries, verdicts.

Everything a hook takes or returns is defined here, so that a plugin author reads one file. Values compare and hash by
content, carry units in their names, and hold no torch or triton object; this module imports neither, nor anything of
kalign but ``errors``, and ``decisions`` and ``devices``, which it gives again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kalign_core.decisions import Entry as Entry
from kalign_core.decisions import EntryKey as EntryKey
from kalign_core.decisions import Refutation as Refutation
from kalign_core.decisions import Tally as Tally
from kalign_core.decisions import Timing as Timing
from kalign_core.decisions import Verdict as Verdict
from kalign_core.decisions import join_facts as join_facts
from kalign_core.devices import Condition as Condition
from kalign_core.devices import DeviceModel as DeviceModel
from kalign_core.devices import Identity as Identity
from kalign_core.devices import Toolchain as Toolchain
from kalign_core.devices import Unit as Unit
from kalign_core.errors import BadArgument, UnknownName

if TYPE_CHECKING:
    from kalign_core.environment import Environment

KnobValue = int | bool | str
Mode = Literal["off", "read", "tune", "frozen"]
MODES: tuple[str, ...] = ("off", "read", "tune", "frozen")
PHASES: tuple[str, ...] = ("train", "prefill", "decode")

# Short dtype names, as they stand in keys and in Triton signatures, by torch's name for them.
DTYPES: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "bool": "i1",
}
ITEM_BYTES: Mapping[str, int] = {
    "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8e4nv": 1, "fp8e5": 1,
    "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u8": 1, "i1": 1,
}  # fmt: skip


class Config(Mapping[str, KnobValue]):
    """Values of launch and meta parameters by name: ``Config(ROWS=2, num_warps=8, enable_fp_fusion=False)``.

    Immutable and hashable; equal when every knob is equal, whatever the order. Knobs read as attributes. ``str()`` is
    the form that stands in files (``ROWS=2 enable_fp_fusion=0 num_warps=8``) and ``Config.parse`` reads it back.
    Values are integers, booleans or short strings without spaces; anything else raises ``BadArgument``.
    """

    __slots__ = ("_hash", "_items")
    _items: dict[str, KnobValue]
    _hash: int

    def __init__(self, **knobs: KnobValue) -> None:
        for name, value in knobs.items():
            is_text = isinstance(value, str)
            if not isinstance(value, (int, str)) or not _plain(str(value)) or (is_text and _is_number(str(value))):
                raise BadArgument(
                    f"knob {name}={value!r} is not an integer, a boolean or a short word",
                    why="configurations are kept in files as plain words",
                    fix=f"Config({name}=4) or Config({name}='ieee')",
                )
            if not name.isidentifier():
                raise BadArgument(f"knob name {name!r} is no identifier", fix="Config(num_warps=4)")
        items = {name: knobs[name] for name in sorted(knobs)}
        object.__setattr__(self, "_items", items)
        object.__setattr__(self, "_hash", hash(tuple(items.items())))

    def __getitem__(self, name: str) -> KnobValue:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._items[name]
        except KeyError:
            raise AttributeError(f"{self!r} has no knob {name!r}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Config is immutable; use config.replace({name}={value!r})")

    def __reduce__(self) -> tuple[Any, ...]:
        return (Config.parse, (str(self),))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and dict(self) == dict(other)

    def __str__(self) -> str:
        return " ".join(f"{n}={int(v) if isinstance(v, bool) else v}" for n, v in self.items())

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{n}={v!r}' for n, v in self.items())})"

    def replace(self, **knobs: KnobValue) -> Config:
        """This configuration with ``knobs`` set."""
        return Config(**{**self, **knobs})

    @classmethod
    def parse(cls, text: str) -> Config:
        """The configuration that ``str(config)`` gives; raises ``BadArgument`` on anything else."""
        knobs: dict[str, KnobValue] = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            if not equals or not name.isidentifier() or not _plain(value) or name in knobs:
                raise BadArgument(f"{word!r} in configuration {text!r} is not NAME=VALUE")
            knobs[name] = int(value) if _is_number(value) else value
        return cls(**knobs)


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _plain(value: str) -> bool:
    return 0 < len(value) <= 64 and value.isascii() and all(c.isalnum() or c in "_-.+" for c in value)


# --- problems -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Argument:
    """One run-time argument of a kernel call, dimensions apart.

    ``dtype`` is the short dtype name for a tensor, ``int``, ``float`` or ``none`` otherwise. Tensors carry
    ``strides`` in elements, one per declared axis, and ``aligned``: whether the base address is a multiple of 16
    bytes. Numbers carry ``value``.
    """

    name: str
    dtype: str
    strides: tuple[int, ...] = ()
    aligned: bool = True
    value: int | float | None = None

    @property
    def is_tensor(self) -> bool:
        return self.dtype not in ("int", "float", "none")


@dataclass(frozen=True, slots=True)
class Problem:
    """One kernel call, exactly: dimensions, arguments, phase; enough to make inputs of its own and to compile for it.

    Dimensions read as attributes (``p.T``), numbers and absent tensors through ``p.value(name)``, dtypes through
    ``p.dtype(name)``. ``index_bits`` is 64 where an element offset may pass 2**31.
    """

    kernel: str
    dims: tuple[tuple[str, int], ...]
    args: tuple[Argument, ...]
    phase: str = "train"
    index_bits: int = 32

    def __getattr__(self, name: str) -> int:
        for dim, size in object.__getattribute__(self, "dims"):
            if dim == name:
                return int(size)
        raise AttributeError(f"{self.kernel} has no dimension {name!r}")

    def argument(self, name: str) -> Argument:
        """The argument called ``name``; raises ``UnknownName``."""
        for arg in self.args:
            if arg.name == name:
                return arg
        raise UnknownName("argument", name, (a.name for a in self.args))

    def dtype(self, name: str) -> str:
        """Short dtype name of the tensor ``name``, or ``none`` where the call passed None."""
        return self.argument(name).dtype

    def value(self, name: str) -> int | float | None:
        """The number passed as ``name``."""
        return self.argument(name).value


# --- platforms and plugins ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a probe found: whether the platform can be used here, and the reason in words."""

    usable: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PlatformRecord:
    """One platform that a plugin provides.

    ``probe`` is cheap (no context, no driver library, no torch) and looks only at the environment it is given.
    ``factory`` names the Platform class as ``module:attribute``, imported when the platform is first used.
    ``models`` are the devices it can compile for without one at hand. ``fallback`` platforms are chosen by themselves
    only when no other can be used, the first of them where there are several.
    """

    name: str
    probe: Callable[[Environment], Evidence]
    factory: str
    models: tuple[DeviceModel, ...] = ()
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One line of ``kalign plugins``. ``state`` is ``active``, ``source``, ``disabled`` or ``broken``."""

    name: str
    distribution: str
    version: str
    api: str
    state: str
    reason: str = ""
    traceback: str = field(default="", repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class StrategyRecord:
    """A search strategy: ``search(race)`` names the survivors of a field of candidates; see ``tuner/search.py``."""

    name: str
    search: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """A store of decisions: ``factory(settings)`` gives a ``kalign_core.cache.base.Store``."""

    name: str
    factory: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class InputFamily:
    """One way to fill a kernel's data arguments: ``fill(request)`` gives a tensor; see ``verifier/inputs.py``.

    ``sees_order`` claims that another order of summation changes at least one byte of the result.
    """

    name: str
    fill: Callable[..., Any]
    sees_order: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the gate: which inputs, at which sizes, in which rows, into which memory.

    ``family`` and ``seed`` choose the numbers, ``dims`` overrides sizes, ``variant`` the layout (verifier/variants.py).
    Row ``i`` of the case is row ``i * step + shift`` of the whole problem, counted round. ``neighbours`` replaces all
    rows but those ``kept`` by ``nan``, ``inf``, ``huge``, ``zero`` or ``reseeded`` numbers. ``fill`` is the byte in the
    outputs' memory beforehand, ``repeats`` how often it runs, ``how``: plainly, in a ``graph`` or on a busy ``stream``.
    Raises ``BadArgument`` where it never runs: what nobody launched must not pass for evidence.
    """

    check: str
    family: str = "normals"
    seed: int = 0
    dims: tuple[tuple[str, int], ...] = ()
    shift: int = 0
    step: int = 1
    neighbours: str = ""
    kept: tuple[int, ...] = ()
    fill: int = 0xA5
    repeats: int = 1
    variant: str = ""
    how: str = ""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise BadArgument(f"a case of {self.check!r} runs {self.repeats} times", fix="repeats=1, or more")


@dataclass(frozen=True, slots=True)
class Check:
    """One stage of the gate: ``cases(bench)`` gives the cases on which candidate and reference must agree.

    ``stage`` orders the checks (1 to 7 are the core's). A check that raises refutes.
    """

    name: str
    stage: int
    cases: Callable[..., Iterable[Case]]
