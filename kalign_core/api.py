"""``kalign.tune``, ``verify``, ``explain`` and ``warmup``: what is asked of operators from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kalign_core import context, session
from kalign_core.declare import lower
from kalign_core.errors import BadArgument
from kalign_core.observer import Recorded
from kalign_core.records import Config, Entry, Verdict
from kalign_core.session import Session

if TYPE_CHECKING:
    from kalign_core.ops.base import Operator


@dataclass(frozen=True, slots=True)
class Decided:
    """What was decided for one kernel of an operator: ``tuned`` now, or a ``hit`` of what was known."""

    kernel: str
    problem: str
    entry: Entry | None
    how: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Verified:
    """The gate's verdict on the launch that served one kernel; ``removed`` where the store gave its decision up."""

    kernel: str
    problem: str
    config: Config
    verdict: Verdict
    removed: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which launch would serve one kernel of a call, and why."""

    kernel: str
    problem: str
    args: str
    phase: str
    mode: str
    config: Config
    why: str

    def __str__(self) -> str:
        return f"{self.kernel} {self.problem} {self.phase}: {self.config} ({self.why}; mode {self.mode})"


def tune(op: Operator, *args: Any, retune: bool = False) -> list[Decided]:
    """Tune every kernel that ``op(*args)`` and its backward run, for these arguments' problem; gives the decisions.

    ``args`` are the operator's own, on the device to tune for; those that require gradients have their backward tuned
    too. What is known already is a hit, unless ``retune`` measures it again. The phase is that of ``kalign.using``.
    """
    here = session.current()
    decided = []
    for call in recorded(op, *args):
        problem = here.key(call.kernel, call.problem, call.device).problem
        entry = None if retune else here.lookup(call.kernel, call.problem, call.device)
        if entry is not None:
            decided.append(Decided(call.kernel.name, problem, entry, "hit"))
            continue
        report, stored = here.tune(call.kernel, call.problem, call.device)
        decided.append(Decided(call.kernel.name, problem, report.entry, "tuned" if stored else "kept", report.reason))
    return decided


def verify(op: Operator, *args: Any, strict: bool = False) -> list[Verified]:
    """Hold the launches that serve ``op(*args)`` here to the gate again; gives a verdict for each kernel.

    The launch is the stored winner where there is one, else the reference itself, which is then held to its promises.
    A winner that is refuted serves no further call here, and its decision is removed where the store allows it. Raises
    ``NotTunable`` where the reference breaks its own promises.
    """
    here = session.current()
    return [verified(here, call, strict=strict) for call in recorded(op, *args)]


def verified(here: Session, call: Recorded, *, strict: bool) -> Verified:
    """The gate's verdict for one kernel call."""
    from kalign_core.hal.torch_compat import nothing_in_force
    from kalign_core.verifier.ahead import compile_ahead
    from kalign_core.verifier.bench import Bench
    from kalign_core.verifier.gate import open_gate

    kernel, problem, platform = call.kernel, call.problem, here.platform
    entry = here.lookup(kernel, problem, call.device)
    reference = kernel.reference_config(problem)
    config = entry.config if entry else reference
    with nothing_in_force(), platform.on(call.device):
        bench = Bench(platform, kernel, problem, call.device, strict=strict)
        gate, bound = open_gate(here.plugins, bench, bench.bound(reference)), bench.bound(config)
        compile_ahead(here, gate, [bound], gate.all_cases())
        gate.check_reference()
        [verdict] = gate.examine([bound])
    # Its bytes differ; a check that raised would tell of the check alone.
    is_refuted = verdict.refutation is not None and bool(verdict.refutation.argument)
    removed = entry is not None and config != reference and is_refuted and _discard(here, call, entry, verdict)
    return Verified(kernel.name, here.key(kernel, problem, call.device).problem, config, verdict, removed)


def _discard(here: Session, call: Recorded, entry: Entry, verdict: Verdict) -> bool:
    """Have ``entry`` serve no call of this process, nor its code be chosen again; whether the store gave it up.

    A tuning holds candidates to the quick suite alone: what strict cases refuted must not come back with the next one.
    """
    facts, failures = here.facts(call.device), here.pool.failures
    here.refuted.add((entry.key, entry.config))
    if verdict.refutation is not None:
        failures.keep_in(here.store.path(facts.identity) if facts.identity.known else None)
        code, target = lower(call.kernel, call.problem, entry.config), facts.model.target
        for fault in (verdict.refutation, f"kalign verify refuted it: {verdict.refutation}"):
            failures.remember(entry.key, target, code, fault)
        failures.flush()
    removed = here.store.remove(facts.identity, (entry.key,)) > 0
    here.forget(call.kernel)
    return removed


def explain(op: Operator, *args: Any) -> list[Explanation]:
    """Say which launch would serve each kernel of ``op(*args)`` in the mode and phase in force, and why."""
    here, call = session.current(), context.current()
    return [explained(here, known, call.mode) for known in recorded(op, *args)]


def explained(here: Session, call: Recorded, mode: str) -> Explanation:
    """The explanation for one kernel call."""
    key = here.key(call.kernel, call.problem, call.device)
    reference = call.kernel.reference_config(call.problem)
    entry = here.lookup(call.kernel, call.problem, call.device)
    if mode == "off":
        config, why = reference, "tuning is off, the reference runs"
    elif entry is None and mode == "tune" and (settled := here.settled(call.kernel, call.problem, call.device)):
        config, why = settled.config or reference, f"tuned in this process, not stored: {settled.reason}"
    elif entry is None:
        outcome = {"frozen": "an error", "tune": "it would be tuned now"}.get(mode, "the reference runs")
        config, why = reference, f"no entry matches: {outcome}"
    elif entry.config == reference:
        config, why = reference, f"decided {entry.decided}: the reference is best"
    else:
        config, why = entry.config, f"decided {entry.decided}: {_gain(entry)}"
    return Explanation(call.kernel.name, key.problem, key.args, key.phase, mode, config, why)


def warmup(op: Operator, problems: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> list[Explanation]:
    """Resolve, compile and load ahead what ``op`` will launch for ``problems``; gives what that is.

    A problem is a tuple of the operator's own arguments, or its sizes with an optional ``dtype``, as in a shapes file:
    ``{"T": 16, "H": 4096, "dtype": "bf16"}``, for which inputs are made on the first device. Each is called once, and
    gone back through where arguments require gradients, in the mode and phase in force: mode ``tune`` tunes what is
    not known yet. Calls of these problems then compile nothing, also within a graph capture, where nothing can be
    resolved for good. Raises ``BadArgument`` for what is no operator or no problem, ``UnknownName`` for a dimension or
    dtype it does not have, and during capture.
    """
    here = session.current()
    if here.platform.capturing():
        raise BadArgument("kalign.warmup during graph capture", fix="call it before the capture begins")
    found: dict[Explanation, None] = {}
    for problem in problems:
        args = _arguments(here, op, problem)
        found.update(dict.fromkeys(explain(op, *args)))
        op.exercise(*(_leaf(arg) for arg in args))
    return list(found)


def _arguments(here: Session, op: Operator, problem: Any) -> tuple[Any, ...]:
    import torch

    if isinstance(problem, tuple):
        return problem
    fix = f"kalign.warmup(kalign.ops.{op.name}, [{dict(op.shapes[0])}])"
    if not isinstance(problem, Mapping):
        raise BadArgument(f"warmup: {problem!r} is no problem", why="a tuple of arguments or a table of sizes", fix=fix)
    given = dict(problem)
    dtype = op.dtype_named(given.pop("dtype", op.dtypes[0]), fix=f'"dtype": "{op.dtypes[0]}"')
    sizes = op.sizes(given, fix=fix)
    index = here.platform.devices()[0]
    device = torch.device(here.platform.device_type, index) if index >= 0 else torch.device(here.platform.device_type)
    return op.inputs(sizes, dtype, 0, device)


def recorded(op: Operator, *args: Any) -> list[Recorded]:
    """The kernel calls of ``op(*args)`` and its backward, each problem once; nothing is launched.

    Raises ``BadArgument`` for what is no operator, and whatever ``op`` raises for these arguments.
    """
    from kalign_core.ops.base import Operator

    if not isinstance(op, Operator):
        raise BadArgument(f"{op!r} is no operator", fix="kalign.tune(kalign.ops.rms_norm, x, weight)")
    here = session.current()
    with here.recording, context.restored(context.the(context.RECORD, context.current().phase)):
        here.recorded = []
        op.exercise(*(_leaf(arg) for arg in args))
        return list(dict.fromkeys(here.recorded))


def recorded_forms(op: Operator, sizes: Mapping[str, int], dtype: str, device: Any) -> list[Recorded]:
    """The kernel calls of every form of ``op`` that is tuned for ``sizes`` by name, each problem once."""
    return list(dict.fromkeys(call for args in op.forms(sizes, dtype, 0, device) for call in recorded(op, *args)))


def _leaf(arg: Any) -> Any:
    """The same memory without its history, so that going back through it leaves the caller's gradients alone."""
    return arg.detach().requires_grad_(arg.requires_grad) if hasattr(arg, "detach") else arg


def _gain(entry: Entry) -> str:
    for ours, reference in ((entry.cold_us, entry.reference_cold_us), (entry.warm_us, entry.reference_warm_us)):
        if ours and reference:
            return f"{reference / ours:.2f} times the reference's speed when tuned"
    return "no times stored"
