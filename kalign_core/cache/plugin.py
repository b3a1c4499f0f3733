"""The built-in plugin that provides the TOML store; made of the same hook that any other store would use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kalign_core.hookspecs import hookimpl
from kalign_core.records import StoreRecord

if TYPE_CHECKING:
    from kalign_core.cache.toml_store import TomlStore
    from kalign_core.settings import Settings

KALIGN_API = 1


def toml_store(settings: Settings) -> TomlStore:
    """The store that keeps one TOML file per device in the folder that ``settings`` name."""
    from kalign_core.cache.toml_store import TomlStore

    return TomlStore(settings)


@hookimpl
def kalign_stores() -> Iterable[StoreRecord]:
    """Give the store ``toml``."""
    return (StoreRecord("toml", toml_store),)
