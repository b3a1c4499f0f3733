"""Where a device's file lies: the folder, and the name in it.

Names are short and made of letters, digits and dashes whatever a device is called; the readable identity is inside.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import platformdirs

from kalign_core.cache.device_table import names_of
from kalign_core.records import Identity
from kalign_core.settings import Settings

STEM_LENGTH = 80
DIGEST_DIGITS = 16
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


def cache_folder(settings: Settings) -> Path | None:
    """The folder of the devices' files, absolute; None where this user has no folder to keep files in.

    ``settings.cache_dir`` if set, else the user's cache folder. A home of ``/``, an empty one or one that does not
    exist is no home: containers with a made-up user have those, and files do not belong there.
    """
    if settings.cache_dir is not None:
        return Path(os.path.abspath(settings.cache_dir.expanduser()))
    if not os.path.isabs(os.environ.get("XDG_CACHE_HOME", "")):
        home = os.environ.get("HOME", os.path.expanduser("~"))
        if os.path.abspath(home or "/") == "/" or not os.path.isabs(home) or not os.path.isdir(home):
            return None
    return Path(platformdirs.user_cache_dir("kalign", appauthor=False))


def file_paths(folder: Path, identity: Identity) -> tuple[Path, Path]:
    """The device's file in ``folder``, and the one it takes where the first belongs to another device."""
    stem = "".join(c if c in _SAFE else "_" for c in identity.file_stem)[:STEM_LENGTH]
    digest = hashlib.sha256(repr(names_of(identity)).encode("utf-8", "backslashreplace")).hexdigest()
    return folder / f"{stem}.toml", folder / f"{stem}-{digest[:DIGEST_DIGITS]}.toml"
