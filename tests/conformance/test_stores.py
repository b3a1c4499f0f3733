"""kalign's own stores keep to the contract that other people's have to."""

from __future__ import annotations

from kalign_core.testing import StoreConformance


class TestToml(StoreConformance):
    """The store that decisions go to by default."""

    plugin = "kalign_core.cache.plugin"
    store = "toml"


class TestMemory(StoreConformance):
    """The store that is used where no other can be."""

    plugin = "tests.conformance.memory_plugin"
    store = "memory"
    lasting = False
