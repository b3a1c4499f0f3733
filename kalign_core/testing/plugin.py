"""What every plugin has to do, whatever it provides: load without a device, and keep to the hooks.

The other suites inherit from here, so that each names its plugin by module and has ``module`` and ``plugins`` at hand.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any, ClassVar

import pytest

from kalign_core import plugins as loading
from kalign_core.errors import BadArgument
from kalign_core.plugin_check import HOOKS, check_module
from kalign_core.plugins import Plugins
from kalign_core.settings import Settings
from kalign_core.testing import elsewhere


class PluginConformance:
    """Inherit, and set ``plugin`` to the module that the entry point names::

    class TestPlugin(PluginConformance):
        plugin = "my_package.plugin"
    """

    plugin: ClassVar[str]

    @pytest.fixture
    def module(self) -> ModuleType:
        """The plugin's module."""
        return importlib.import_module(self._said("plugin"))

    @pytest.fixture
    def plugins(self, module: ModuleType) -> Plugins:
        """kalign's built-in plugins, and this one."""
        built_in = loading.load(Settings(plugins=()), path=[])
        return built_in if built_in.manager.get_name(module) else built_in.with_module("under test", module)

    def _said(self, attribute: str) -> Any:
        """What the class sets ``attribute`` to; raises ``BadArgument`` where it does not."""
        value = getattr(type(self), attribute, None)
        if not isinstance(value, str):
            raise BadArgument(
                f"{type(self).__name__} does not say which {attribute} it tests",
                fix=f'class {type(self).__name__}(...): {attribute} = "..."',
            )
        return value

    def test_the_plugin_keeps_to_the_contract(self, module: ModuleType) -> None:
        """The module speaks kalign's API, and each of its hooks exists and takes what that hook is called with."""
        check_module(module)

    def test_the_plugin_has_a_hook(self, module: ModuleType) -> None:
        """A plugin implements at least one hook."""
        assert [name for name in HOOKS if inspect.isfunction(vars(module).get(name))] != []

    def test_the_plugin_is_active(self, module: ModuleType) -> None:
        """The loader registers the plugin, and its records are what the hooks promise."""
        made = Plugins(strict=True).with_module("under test", module)
        for hook in ("kalign_stores", "kalign_strategies"):
            assert [answer.error for answer in made.ask(hook) if answer.error] == []
        assert [(row.state, row.reason) for row in made.rows] == [("active", "")]

    def test_importing_the_plugin_touches_no_device(self) -> None:
        """Loading a plugin imports no device library and selects no platform, opens no device and starts nothing."""
        assert elsewhere.ask("loading", self._said("plugin")) == []
