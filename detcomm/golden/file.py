# SPDX-License-Identifier: Apache-2.0
"""The file of a golden run: JSON lines, one thing a line, so that a review shows which tensors changed at which step.

    {"format": "detcomm-golden/1", "detail": "tensors", "environment": {…}, "config": {…}}
    {"kind": "weights", "name": "head.weight", "dtype": "float32", "shape": [4, 32]}
    {"step": 0, "kind": "weights", "name": "head.weight", "digest": "…"}
    {"step": 0, "loss": {…}, "summary": {"weights": "…"}}
    {"end": 1}

A step's last line closes it; a reader leaves out a step that is not closed. So whatever a crash leaves is usable. Knows
no tensors and no ranks, and needs no torch.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from detcomm.errors import UsageError

FORMAT = "detcomm-golden/1"
FILE_VARIABLE = "DETCOMM_GOLDEN_FILE"
"""Where to record; set by ``detcomm golden record``, and stronger than a script's own path."""

PARTIAL_SUFFIX = ".partial"
"""Of a file that is being written; the name goes when the run has ended well."""

Detail = Literal["tensors", "summary"]
"""Whether a digest of each tensor is kept, or of each kind alone."""

DETAILS = ("tensors", "summary")


@attrs.frozen
class Tensor:
    """What is known of one tensor at one step.

    Attributes:
        shape: ``None`` if nobody has said it.
        digest: 32 hexadecimal digits.
    """

    dtype: str
    shape: tuple[int, ...] | None
    digest: str

    @property
    def form(self) -> str:
        """Type and shape, for people."""
        return self.dtype if self.shape is None else f"{self.dtype} {list(self.shape)}"


@attrs.frozen
class Step:
    """One step.

    Attributes:
        loss: ``None`` if none was given; else ``dtype``, ``bits``, ``decimal``, ``ranks`` and ``digest``.
        summary: a digest of each kind.
        tensors: by kind and name; empty if the file has summaries alone.
    """

    step: int
    loss: dict[str, Any] | None
    summary: dict[str, str]
    tensors: dict[tuple[str, str], Tensor]


@attrs.frozen
class GoldenRun:
    """A file that has been read.

    Attributes:
        complete: whether the run ended well; otherwise the steps are those before its end.
    """

    detail: str
    environment: dict[str, Any]
    config: dict[str, Any]
    steps: dict[int, Step]
    complete: bool


def summarise(tensors: Mapping[str, Tensor]) -> str:
    """The digest of one kind: BLAKE2b, 128 bits, over a line of name, type, shape and digest for each tensor.

    The lines are sorted by name as UTF-8, and end with a line feed each; the fields are separated by tabs; a shape is
    written ``4x32``, that of a scalar is empty, and one that is unknown is a question mark.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items(), key=lambda item: item[0].encode()):
        shape = "?" if tensor.shape is None else "x".join(map(str, tensor.shape))
        digest.update(f"{name}\t{tensor.dtype}\t{shape}\t{tensor.digest}\n".encode())
    return digest.hexdigest()


class Writer:
    """Writes a file step by step, under a name of its own until the run has ended well.

    A file that stood there before stays until then. Each step is one write of whole lines.

    Raises:
        UsageError: the file cannot be written, or ``config`` is no JSON.
    """

    def __init__(self, path: Path, detail: Detail, environment: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._path = path
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._detail = detail
        self._forms: dict[tuple[str, str], tuple[str, tuple[int, ...] | None]] = {}
        self._num_steps = 0
        header = {"format": FORMAT, "detail": detail, "environment": environment, "config": config}
        try:
            line = json.dumps(header, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(f"golden run: config: expected what JSON can say, got {error}") from None
        try:
            self._file = self._partial.open("w", encoding="utf-8", newline="\n")
        except OSError as error:
            raise UsageError(f"golden run: cannot write {self._partial}: {error.strerror}") from None
        self._write([line])

    def write(self, step: Step) -> None:
        """Append a step; it is with the operating system when this returns."""
        lines = []
        for (kind, name), tensor in step.tensors.items():
            if self._detail != "tensors":
                break
            form = tensor.dtype, tensor.shape
            if self._forms.get((kind, name)) != form:
                self._forms[kind, name] = form
                shape = None if tensor.shape is None else list(tensor.shape)
                lines.append(json.dumps({"kind": kind, "name": name, "dtype": tensor.dtype, "shape": shape}))
            lines.append(json.dumps({"step": step.step, "kind": kind, "name": name, "digest": tensor.digest}))
        lines.append(json.dumps({"step": step.step, "loss": step.loss, "summary": step.summary}))
        self._write(lines)
        self._num_steps += 1

    def close(self, *, ended_well: bool) -> None:
        """Give the file its name if the run ended well; otherwise leave what there is under the partial one."""
        if self._file.closed:
            return
        if ended_well:
            self._write([json.dumps({"end": self._num_steps})])
            os.fsync(self._file.fileno())
        self._file.close()
        if ended_well:
            self._partial.replace(self._path)

    def _write(self, lines: list[str]) -> None:
        self._file.write("\n".join([*lines, ""]))
        self._file.flush()


def read(path: Path) -> GoldenRun:
    """Read a file, whole or what a crash has left of one.

    Raises:
        UsageError: it is none, or of a format that this release does not know.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    lines = text.split("\n")[:-1]  # after the last line feed there is nothing, or what a crash has cut
    records = [_parse(path, number, line) for number, line in enumerate(lines, 1)]
    if not records or "format" not in records[0]:
        raise UsageError(f"{path}: expected a golden run, whose first line names its format")
    if records[0]["format"] != FORMAT:
        raise UsageError(f"{path}: expected format {FORMAT}, got {records[0]['format']}")
    header = records[0]
    forms: dict[tuple[str, str], tuple[str, tuple[int, ...] | None]] = {}
    open_step: dict[tuple[str, str], Tensor] = {}
    steps: dict[int, Step] = {}
    try:
        for number, record in enumerate(records[1:], 2):
            if "dtype" in record:
                shape = record["shape"]
                forms[record["kind"], record["name"]] = record["dtype"], None if shape is None else tuple(shape)
            elif "digest" in record:
                key = record["kind"], record["name"]
                open_step[key] = Tensor(*forms[key], record["digest"])
            elif "summary" in record:
                if record["step"] in steps:
                    raise UsageError(f"{path}:{number}: step {record['step']} a second time")
                if header["detail"] == "tensors":
                    _check_summary(path, number, record["summary"], open_step)
                steps[record["step"]] = Step(record["step"], record["loss"], record["summary"], open_step)
                open_step = {}
        environment, config, detail = header["environment"], header["config"], header["detail"]
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path}: not a golden run: {error!r}") from None
    if not steps:
        raise UsageError(f"{path}: no step was recorded")
    return GoldenRun(detail, environment, config, steps, complete="end" in records[-1])


def _check_summary(path: Path, number: int, summary: dict[str, str], tensors: Mapping[tuple[str, str], Tensor]) -> None:
    by_kind: dict[str, dict[str, Tensor]] = {}
    for (kind, name), tensor in tensors.items():
        by_kind.setdefault(kind, {})[name] = tensor
    for kind in summary.keys() | by_kind.keys():
        if summary.get(kind) != summarise(by_kind.get(kind, {})):
            raise UsageError(f"{path}:{number}: the summary of {kind} does not fit its tensors: the file was changed")


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{path}:{number}: expected a line of JSON: {error}") from None
    if not isinstance(record, dict):
        raise UsageError(f"{path}:{number}: expected an object, got {line[:40]}")
    return record
