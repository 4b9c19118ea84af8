# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes when it is done: whether it can is asked before it begins. Knows no command."""

import os
from pathlib import Path
from typing import Annotated

import typer

from detcomm.errors import UsageError


def writable(path: Path | None) -> Path | None:
    """Refuse, before hours of work, a file that could not be written after them."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise typer.BadParameter(f"{path} cannot be written: expected a file in a folder that exists")
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: permission denied")
    return path


def check_can_draw(path: Path, option: str) -> None:
    """Refuse, before hours of work, a picture that could not be drawn after them.

    Raises:
        UsageError: matplotlib is not installed, or it knows no such format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(f"{option} needs matplotlib: pip install 'detcomm[plot]'") from None
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in formats:
        raise UsageError(f"{option} {path}: expected a file name that ends in one of {', '.join(sorted(formats))}")


JsonOption = Annotated[
    Path | None, typer.Option("--json", callback=writable, help="Write the results to this file, too.")
]
