"""The times that `cupyattn tune` measured here: a file a card, in the folder of compiled kernels.

They are trusted by the rules of that folder (jit/store.py): a file that another user could have
written is left out, and so is one of another card or of another form. A warning says so, once.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import env
from ..core.device import NO_GPU, DeviceProps
from ..errors import ArgumentError, CompileError
from ..jit import cache

if TYPE_CHECKING:
    from .card import Card

FOLDER = "cards"
_REMEDY = "delete it, or write it anew with `cupyattn tune`"

Read = Callable[[str, str], "Card"]


def find(props: DeviceProps, read: Read) -> tuple[Card, Path] | None:
    """The card of a device as it was measured here, and its file; None if it was not."""
    if props.index == NO_GPU.index or not env.TUNED.flag():
        return None
    return _find(props.name, props.arch, read)


@lru_cache(maxsize=16)
def _find(name: str, arch: str, read: Read) -> tuple[Card, Path] | None:
    path = None
    # Where the cache's folder has no meaning, the first kernel says so.
    with contextlib.suppress(CompileError):
        path = path_of(name)
    if path is None:
        return None
    try:
        card = _read(path, read)
        if card is None:
            return None
        if card.name != name or card.arch != arch:
            raise ArgumentError(
                f"{path}: it holds the times of {card.name} ({card.arch}), not of {name} ({arch}); "
                + _REMEDY
            )
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(f"{path}: these times are not used ({error.strerror or error}); {_REMEDY}")
        return None
    except ArgumentError as error:
        _warn(str(error))
        return None
    return card, path


def _read(path: Path, read: Read) -> Card | None:
    """None where there is no folder that can be looked into, of which kernels have a word to say.
    Raises OSError and ArgumentError."""
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(_folder().opened())
        except (NotADirectoryError, PermissionError):
            return None
        data = opened.read_beside(FOLDER, path.name)
    return read(data.decode("utf-8", "replace"), str(path))


def _warn(text: str) -> None:
    warnings.warn(f"cupyattn: {text}", RuntimeWarning, stacklevel=2)


def path_of(name: str) -> Path | None:
    """The file of the card of this name, which need not be there; None for a user who has no
    folder for kernels. Raises CompileError if CUPYATTN_CACHE_DIR is no such folder."""
    folder = _folder()
    return None if folder.is_private else folder.path / FOLDER / file_name(name)


def write(name: str, text: str) -> Path:
    """Write the file of the card of this name. Raises OSError, and CompileError as `path_of`."""
    path = path_of(name)
    if path is None:
        raise OSError("this user has no home folder")
    with _folder().opened(create=True) as opened:
        opened.write_beside(FOLDER, path.name, text.encode())
    return path


def _folder() -> cache.CacheFolder:
    folders = cache.cache_folders()
    if not folders:
        raise CompileError("there is no folder for kernels")
    return folders[0]


def file_name(name: str) -> str:
    """`nvidia-h100-80gb-hbm3.json` of "NVIDIA H100 80GB HBM3"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json"
