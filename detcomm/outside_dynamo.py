# SPDX-License-Identifier: Apache-2.0
"""Keeps torch.compile out of our methods: they are Python, and Dynamo would trace into them and fail.

``torch.compiler.disable`` says the same, but imports all of Dynamo (seconds) and adds 1 us to each call; so its two
marks are set directly, where this torch has them.
"""

from typing import Any

import torch

_REASON = "detcomm collectives run eagerly"


def outside_dynamo(cls: type) -> type:
    """Class decorator: Dynamo breaks its graph at every public method of ``cls`` and runs it as it is."""
    for name, member in list(vars(cls).items()):
        if callable(member) and hasattr(member, "__code__") and not name.startswith("__"):
            setattr(cls, name, _marked(member))
    return cls


def _marked(function: Any) -> Any:
    try:
        eval_frame: Any = torch._C._dynamo.eval_frame
        skip = eval_frame._FrameAction.SKIP
        # This frame and the frames called from it.
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):
        disable: Any = torch.compiler.disable
        return disable(function, reason=_REASON)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = _REASON
    function._torchdynamo_disable_recursive = True
    return function
