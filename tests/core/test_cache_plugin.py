"""The built-in store, as any plugin would provide it."""

from __future__ import annotations

from kalign_core.cache import plugin
from kalign_core.settings import Settings
from tests.core.cache_samples import DEVICE, entry, kept, key


def test_the_store_is_called_toml(tmp_path):
    """The hook gives one record whose factory makes a working store from settings."""
    (record,) = plugin.kalign_stores()
    store = record.factory(Settings(cache_dir=tmp_path / "cache"))
    assert (record.name, store.name, store.writable) == ("toml", "toml", True)
    assert kept(store, DEVICE, entry(1))
    assert store.lookup(DEVICE, key(1)) == entry(1)


def test_loading_the_plugin_is_cheap(child):
    """The module imports neither the store nor the libraries it stands on."""
    done = child("import sys, kalign_core.cache.plugin; print([m for m in sys.modules if m in ("
                 "'tomllib', 'tomli_w', 'filelock', 'platformdirs', 'kalign_core.cache.toml_store')])")  # fmt: skip
    assert done.stdout.strip() == "[]", done.stderr
