"""A module of an API that does not exist yet, without a hook, that loads a device library to be imported."""

from __future__ import annotations

import numpy

KALIGN_API = 99
VERSION = numpy.__version__
