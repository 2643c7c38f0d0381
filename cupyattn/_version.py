"""The version, in one place: the build reads it from here.

A release is called "0.3.0". Between releases the version ends with ".dev0", and what is built from
a checkout is called after its last commit: "0.3.0.dev2571+8a312796", the 2571st. A wheel or source
archive has that name in its copy of this file.
"""

from __future__ import annotations

__version__ = "0.3.0.dev0"


def build_version() -> str:
    """The version with the checkout's commit in it: ".dirty" if its files differ from that.

    Without git, or outside a checkout, it is `__version__`.
    """
    import subprocess
    from pathlib import Path

    root = Path(__file__).resolve().parent.parent
    base = __version__.removesuffix(".dev0")
    if base == __version__ or not (root / ".git").exists():
        return __version__

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        count, commit = git("rev-list", "--count", "HEAD"), git("rev-parse", "--short=8", "HEAD")
        is_changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return __version__
    if not count or not commit:
        return __version__
    return f"{base}.dev{count}+{commit}{'.dirty' if is_changed else ''}"
