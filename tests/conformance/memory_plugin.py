"""The store in memory as a plugin gives it; kalign falls back to it without being asked."""

from __future__ import annotations

from kalign_core.hookspecs import hookimpl
from kalign_core.records import StoreRecord

KALIGN_API = 1


@hookimpl
def kalign_stores() -> list[StoreRecord]:
    """The store that keeps decisions for the life of the process."""
    from kalign_core.cache.base import MemoryStore

    return [StoreRecord("memory", lambda settings: MemoryStore())]
