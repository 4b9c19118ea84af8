# SPDX-License-Identifier: Apache-2.0
"""Whether this machine lets one make networks, and as whom: as root, or as root of a user namespace.

Knows nothing of labs but the errors that they raise.
"""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_AS_ROOT_INSIDE = ("--user", "--map-root-user")

_SETTINGS = (
    "user.max_user_namespaces",
    "kernel.unprivileged_userns_clone",  # Debian's
    "kernel.apparmor_restrict_unprivileged_userns",  # Ubuntu's
)


class LabError(Exception):
    """A lab could not be made, or did not do what it was asked."""


class Unavailable(LabError):
    """Labs cannot be made on this machine; the text says why."""


@cache
def isolation() -> tuple[str, ...]:
    """The command that gives a process namespaces of its own: as root, or as root of a user namespace.

    Raises:
        Unavailable: neither works here; with what was said.
    """
    missing = [name for name in ("unshare", "nsenter", "ip", "mount") if shutil.which(name) is None]
    if missing:
        raise Unavailable(f"not installed: {', '.join(missing)} (packages util-linux, iproute2)")
    as_root = [_UNSHARE] if os.geteuid() == 0 else []
    said = []
    for command in (*as_root, (*_UNSHARE, *_AS_ROOT_INSIDE)):
        attempt = [*command, "ip", "link", "add", "bridge", "type", "bridge"]
        done = subprocess.run(attempt, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return command
        said.append(done.stderr.strip())
    raise Unavailable(f"neither root nor user namespaces may make networks here: {'; '.join(said)}{_limits()}")


def _limits() -> str:
    """What the kernel's settings say about user namespaces: which of them an administrator might change."""
    told = [f"{name} = {path.read_text().strip()}" for name in _SETTINGS if (path := _setting(name)).exists()]
    return f" ({', '.join(told)})" if told else ""


def _setting(name: str) -> Path:
    return Path("/proc/sys") / name.replace(".", "/")
