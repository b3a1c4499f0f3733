"""``kalign``: the command line's entry point."""

from __future__ import annotations

import logging

import click
from rich.console import Console
from rich.logging import RichHandler

from kalign_core import __version__
from kalign_core.cli.cache import cache
from kalign_core.cli.compile import compile_
from kalign_core.cli.inspect import doctor, ops, plugins
from kalign_core.cli.tune import tune
from kalign_core.cli.verify import verify


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kalign")
def main() -> None:
    """Tune the launch parameters of GPU kernels on the device at hand, without changing a bit of their results.

    Data goes to standard output (--json everywhere), progress to standard error. Exit codes: 0 done, 1 a check failed,
    2 usage, 3 no platform, 4 entry missing or stale.
    """
    handler = RichHandler(console=Console(stderr=True), show_time=False, show_path=False, markup=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])


for command in (doctor, plugins, ops, tune, verify, compile_, cache):
    main.add_command(command)
