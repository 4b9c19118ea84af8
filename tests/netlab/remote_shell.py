# SPDX-License-Identifier: Apache-2.0
"""In place of ``ssh`` between the nodes of a lab, for launchers that want one: ``remote_shell HOST COMMAND...``.

The command keeps the caller's variables and folder, as a login on a cluster with a shared home would have them.
The lab is the one that ``NETLAB_FOLDER`` names. Works on the nodes themselves: it asks the supervisor.
"""

import os
import sys
from pathlib import Path

from tests.netlab.lab import Lab

FOLDER_VARIABLE = "NETLAB_FOLDER"


def main(arguments: list[str]) -> int:
    """Run a command on a host; its exit code, or 255 as ssh has it if there is no such host."""
    while arguments and arguments[0].startswith("-"):
        del arguments[0]  # options of ssh, none of which means anything here
    host, *words = arguments
    lab = Lab(Path(os.environ[FOLDER_VARIABLE]))
    names = [node.name for node in lab.nodes]
    if host not in names:
        print(f"remote_shell: no node {host}; there are {', '.join(names)}", file=sys.stderr)
        return 255
    # ssh joins its arguments with spaces and leaves them to a shell, and launchers quote for that.
    command = ["/bin/sh", "-c", " ".join(words)]
    return lab.start(names.index(host), command, stdin=0).wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
