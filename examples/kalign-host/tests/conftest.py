"""The tests run on the platform they are about, which has to be known before kalign is imported."""

from __future__ import annotations

import os

os.environ["KALIGN_PLATFORM"] = "host"
os.environ["TRITON_INTERPRET"] = "1"
