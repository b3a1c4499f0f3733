"""One object that owns plugins, platform, store, sites and compile pool; the process has one, tests make their own.

``resolve`` answers what the launch path does not know yet: which launch serves a call. It looks decisions up, tunes
where the mode says so and the moment allows it, and falls back to the reference launch whatever happens: a fault of
kalign must never become a fault of the caller's operator.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kalign_core import context, settings
from kalign_core.cache.base import Store
from kalign_core.cache.key import entry_key
from kalign_core.declare import Kernel
from kalign_core.errors import CandidateFailed, DeviceLost, MissingEntry, MixedDevices, NotNow, NotTunable
from kalign_core.hal.base import Launch, Platform
from kalign_core.launch import Site
from kalign_core.observer import DeviceFacts, KnownDevices, Observer, Pauses, Recorded, Settled
from kalign_core.plugins import Plugins
from kalign_core.problems import problem_of
from kalign_core.records import Config, Entry, EntryKey, Problem

if TYPE_CHECKING:
    from kalign_core.tuner.compile import CompilePool
    from kalign_core.tuner.loop import Report

log = logging.getLogger("kalign")


class Session:
    """Plugins, platform, store and everything resolved so far."""

    def __init__(
        self,
        *,
        platform: Platform | None = None,
        plugins: Plugins | None = None,
        store: Store | None = None,
        configuration: settings.Settings | None = None,
    ) -> None:
        self.settings = configuration or settings.read()
        self._platform, self._plugins, self._store = platform, plugins, store
        self._pool: CompilePool | None = None
        self._devices = KnownDevices(lambda: self.platform)
        self._sites: dict[Kernel, Site] = {}
        self._tuning: set[tuple[EntryKey, int]] = set()
        self._settled: dict[tuple[EntryKey, int], Settled] = {}
        self._lock = threading.RLock()
        self.recording = threading.Lock()
        self._spent_s = 0.0
        self._said: set[str] = set()
        self._lost: DeviceLost | None = None
        self._pauses = Pauses()
        self.observer = Observer()
        # What operators may launch at once for calls they have seen, by everything that was checked about them.
        self.calls: dict[Any, Callable[..., Any]] = {}
        self.recorded: list[Recorded] = []
        self.refuted: set[tuple[EntryKey, Config]] = set()  # winners that serve no more, whatever the store still holds

    # --- parts, made when first needed ----------------------------------------------------------------------------

    @property
    def plugins(self) -> Plugins:
        if self._plugins is None:
            from kalign_core import hal

            self._plugins = hal.plugins
        return self._plugins

    @property
    def platform(self) -> Platform:
        """The platform this session runs on; raises ``NoPlatform`` with the reasons where there is none."""
        if self._platform is None:
            from kalign_core import hal

            self._platform = hal.platform
        return self._platform

    @property
    def store(self) -> Store:
        """The first writable store that plugins give."""
        if self._store is None:
            with self._lock:
                self._store = self._store or self._open_store()
        return self._store

    def _open_store(self) -> Store:
        from kalign_core.cache.base import MemoryStore

        for answer in self.plugins.ask("kalign_stores"):
            records = answer.value if isinstance(answer.value, (list, tuple)) else ()
            for record in records:
                try:
                    store = record.factory(self.settings)
                except Exception as error:  # noqa: BLE001  # a plugin's store; the next one takes the decisions
                    self.say(f"store {record.name!r} of plugin {answer.plugin!r} is not used: {error!r}")
                    continue
                if isinstance(store, Store) and store.writable:
                    return store
        return MemoryStore()

    @property
    def pool(self) -> CompilePool:
        """The compile workers."""
        if self._pool is None:
            from kalign_core.tuner.compile import CompilePool

            with self._lock:
                self._pool = self._pool or CompilePool()
        return self._pool

    def facts(self, device: int) -> DeviceFacts:
        """Identity, toolchain and limits of ``device``."""
        return self._devices[device]

    def site(self, kernel: Kernel) -> Site:
        """Where ``kernel`` is launched in this session."""
        site = self._sites.get(kernel)
        if site is None:
            site = self._sites.setdefault(kernel, Site(kernel, self))
        return site

    def close(self) -> bool:
        """End the compile workers and have every decision written; whether all that the disk is to have is there."""
        if self._pool is not None:
            self._pool.close()
        return self._store is None or self._store.flush()

    def forget(self, kernel: Kernel | None = None) -> None:
        """Drop what was resolved for ``kernel`` (all by default), so that new decisions are seen."""
        self.calls = {}  # another one, by which those who remember the last call notice
        for site in list(self._sites.values()):
            if kernel is None or site.kernel is kernel:
                site.memo.clear()

    @contextlib.contextmanager
    def active(self) -> Iterator[Session]:
        """Make this the process's session inside the block."""
        global _current
        outer, _current = _current, self
        try:
            yield self
        finally:
            _current = outer

    # --- resolving ------------------------------------------------------------------------------------------------

    def resolve(self, site: Site, call: context.Call, args: Sequence[Any]) -> tuple[Launch, bool]:
        """Which launch answers a call that the memo does not know, and whether the memo may keep the answer."""
        kernel = site.kernel
        problem = problem_of(kernel, args, call.phase)
        device = self._device(kernel, args)
        if call.mode == context.RECORD:
            self.recorded.append(Recorded(kernel, problem, device))
            return _launch_nothing, False
        reference = kernel.reference_config(problem)
        if call.mode == "off":
            return self._launcher(kernel, problem, reference, args), True
        if not all(size for _, size in problem.dims):
            return self._launcher(kernel, problem, reference, args), False  # empty: nothing to tune
        config, keep = self._configuration(kernel, problem, device, call.mode)
        if config is not None and config != reference:
            try:
                return self._launcher(kernel, problem, config, args), keep
            except CandidateFailed as error:
                self.say(f"{kernel}: the stored launch {config} failed ({error.what}); using the reference")
        return self._launcher(kernel, problem, reference, args), keep

    def recover(self, site: Site, call: context.Call, args: Sequence[Any], error: CandidateFailed) -> Launch:
        """Launch the reference after another launch failed on ``args``, and give it to be remembered instead.

        Raises ``CandidateFailed`` where the reference fails as well.
        """
        problem = problem_of(site.kernel, args, call.phase)
        launch = self._launcher(site.kernel, problem, site.kernel.reference_config(problem), args)
        launch(*args)
        self.say(f"{site.kernel}: a launch failed ({error.what}); using the reference")
        return launch

    def _launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        """A launch for callers, and for graphs that they capture: what it launches stays loaded."""
        launch = self.platform.launcher(kernel, problem, config, args)
        getattr(launch, "keep", lambda: None)()
        return launch

    def lookup(self, kernel: Kernel, problem: Problem, device: int) -> Entry | None:
        """The stored decision for ``problem``, if it was not refuted and is still in today's space."""
        facts = self.facts(device)
        entry = self.store.lookup(facts.identity, self.key(kernel, problem, device))
        if entry is None or entry.config == kernel.reference_config(problem):
            return entry
        is_refuted = (entry.key, entry.config) in self.refuted
        return None if is_refuted or entry.config not in self.space(kernel, problem, device) else entry

    def key(self, kernel: Kernel, problem: Problem, device: int) -> EntryKey:
        """The key of ``problem`` on ``device`` with today's toolchain, source and suite."""
        from kalign_core.verifier.checks import SUITE

        return entry_key(kernel, problem, self.facts(device).toolchain, SUITE)

    def space(self, kernel: Kernel, problem: Problem, device: int) -> Any:
        """The candidates for ``problem`` on ``device``."""
        from kalign_core.tuner.space import space

        platform = self.platform
        return space(self.plugins, platform.name, platform.launch_options, kernel, problem, self.facts(device).model)

    def settled(self, kernel: Kernel, problem: Problem, device: int) -> Settled | None:
        """What a tuning in this process left for ``problem`` that no store keeps."""
        return self._settled.get((self.key(kernel, problem, device), device)) if self._settled else None

    def _configuration(self, kernel: Kernel, problem: Problem, device: int, mode: str) -> tuple[Config | None, bool]:
        """The configuration to launch, None for the reference, and whether that answer stands for good."""
        try:
            return self._decided(kernel, problem, device, mode)
        except (MissingEntry, DeviceLost):
            raise
        except Exception as error:
            if mode == "frozen":
                raise
            self.observer.gave_up(kernel, problem, str(error))
            self.say(f"{kernel} stays with its reference: {error!r}")
            return None, True

    def _decided(self, kernel: Kernel, problem: Problem, device: int, mode: str) -> tuple[Config | None, bool]:
        retune = mode == "tune" and self.observer.retune
        entry = None if retune else self.lookup(kernel, problem, device)
        if entry is not None:
            self.observer.hit(kernel, problem, entry)
            return entry.config, True
        if mode == "frozen":
            raise self._missing(kernel, problem, device)
        if mode == "read":
            return None, True
        settled = None if retune else self.settled(kernel, problem, device)
        return (settled.config, True) if settled else self._tune_now(kernel, problem, device)

    def _missing(self, kernel: Kernel, problem: Problem, device: int) -> MissingEntry:
        from kalign_core import ops

        return MissingEntry(
            f"mode frozen, and no entry for {kernel} {self.key(kernel, problem, device).problem} {problem.phase}",
            why="frozen never tunes and never falls back in silence",
            fix=f"{ops.tune_command(kernel, problem)}, or kalign.using(mode='read') to launch the reference",
        )

    def _tune_now(self, kernel: Kernel, problem: Problem, device: int) -> tuple[Config | None, bool]:
        """Tune at first execution if this is a moment for it; whatever goes wrong, the reference serves the call."""
        if self.platform.capturing():
            return None, False
        if self._lost or self._spent_s >= self.settings.tune_budget_s:
            spent = f"the tuning budget of {self.settings.tune_budget_s:g} s is spent; using references"
            self.say(str(self._lost or spent))
            return None, True
        token = (self.key(kernel, problem, device), device)
        if not self._pauses.is_over(token):
            return None, False
        with self._lock:
            if token in self._tuning:
                return None, False  # another thread is at it
            self._tuning.add(token)
        started = time.monotonic()
        try:
            known = None if self.observer.retune else self.lookup(kernel, problem, device)
            if known is not None:
                return known.config, True  # another thread decided since this one looked
            report, _ = self.tune(kernel, problem, device, budget_s=self.settings.tune_budget_s - self._spent_s)
            return (report.entry.config if report.entry else None), True
        except (NotTunable, CandidateFailed) as error:
            self.observer.gave_up(kernel, problem, str(error))
            is_passing = isinstance(error, NotNow) and self._pauses.met(token)
            self.say(f"{kernel} stays with its reference{' for now' if is_passing else ''}: {error}")
            if not is_passing:
                self._settled[token] = Settled(None, error.what)
            return None, not is_passing
        except DeviceLost as error:
            self._stop(error)
            raise
        except Exception as error:
            self._settled[token] = Settled(None, repr(error))
            raise
        finally:
            with self._lock:
                self._spent_s += time.monotonic() - started
                self._tuning.discard(token)

    def tune(self, kernel: Kernel, problem: Problem, device: int, *, budget_s: float = math.inf) -> tuple[Report, bool]:
        """Tune ``kernel`` for ``problem`` and keep the decision; gives the report and whether it goes to disk.

        Past ``budget_s`` seconds nothing more is tried. Raises ``NotTunable`` with a reason, ``DeviceLost``.
        """
        from kalign_core.tuner.failures import Watched
        from kalign_core.tuner.loop import EFFORTS, Tuning
        from kalign_core.tuner.seeds import seeds

        if self._lost is not None:
            raise self._lost.with_traceback(None)
        key = self.key(kernel, problem, device)
        identity = self.facts(device).identity
        effort = self.observer.effort or EFFORTS["normal"]
        tuning = Tuning(
            self.plugins, self.platform, self.pool, device, kernel, problem, key,
            effort=replace(effort, budget_s=min(effort.budget_s, budget_s)),
            incumbent=self.store.lookup(identity, key),
            seeds=seeds(self.store.entries(identity), key),
            watched=self.observer.watched or Watched(),
            progress=self.observer.started(kernel, problem),
        )  # fmt: skip
        self.pool.failures.keep_in(self.store.path(identity) if identity.known else None)
        try:
            report = tuning.run()
        except DeviceLost as error:
            self._stop(error)
            raise
        if report.storable and report.entry is not None:
            stored = self.store.put(identity, report.entry)
            self._settled.pop((key, device), None)
        else:
            stored = False
            config = report.entry.config if report.entry else None
            self._settled[key, device] = Settled(config, report.reason)
        self.observer.finished(report, stored)
        self.forget(kernel)
        return report, stored

    def _stop(self, lost: DeviceLost) -> None:
        """Tune nothing more in this process: whatever it launched would fail or, worse, be measured."""
        self._lost = lost
        self.say(str(lost))

    def _device(self, kernel: Kernel, args: Sequence[Any]) -> int:
        tensor = next(arg for arg in args if hasattr(arg, "get_device"))
        if tensor.device.type != self.platform.device_type:
            raise MixedDevices(
                f"{kernel}: tensors are on {tensor.device}, the platform in use is {self.platform.name}",
                why=f"{self.platform.name} launches on {self.platform.device_type} tensors",
                fix=f"x.to({self.platform.device_type!r}), or export KALIGN_PLATFORM=NAME; see kalign doctor",
            )
        return int(tensor.get_device())

    def say(self, text: str) -> None:
        """Warn once per text."""
        with self._lock:
            is_new = text not in self._said
            self._said.add(text)
        if is_new:
            log.warning(text)

    def renew_locks(self) -> None:
        """Make this session usable in a child of fork: locks and workers are the parent's, what was resolved stays."""
        self._lock, self.recording = threading.RLock(), threading.Lock()
        self._tuning = set()
        self._pool = None


def _launch_nothing(*args: Any) -> None:
    """What a call launches that is recorded: the arguments are the caller's own, and nobody asked for a result."""


_current: Session | None = None
_making = threading.Lock()


def current() -> Session:
    """The process's session, made when first asked for."""
    return _current or _make()


def is_made() -> bool:
    """Whether this process has its session already."""
    return _current is not None


def _make() -> Session:
    global _current
    with _making:
        if _current is None:
            _current = Session()
    return _current


def _renew_locks() -> None:
    """A child of fork must not wait for locks its parent held."""
    global _making
    _making = threading.Lock()
    if _current is not None:
        _current.renew_locks()


os.register_at_fork(after_in_child=_renew_locks)
