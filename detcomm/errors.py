# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as a tree.

    DetcommError
      UsageError            a wrong argument; nothing has been sent, the group stays usable
        UnsupportedError    a valid torch call that detcomm refuses (dtype, operation, layout)
      ScheduleError         a schedule or a plan breaks its contract
      MismatchError         the ranks disagree about a call or about their options
      TransportError        a peer is lost; the group is unusable afterwards
        PeerTimeoutError    a peer did not answer within the group's timeout
      NativeError           a status of the native library

Messages say what, where (collective, sequence number, rank, peer, step, chunk), expected and got.
"""


class DetcommError(RuntimeError):
    """Base of every error that detcomm raises on purpose."""


class UsageError(DetcommError):
    """A wrong argument. Nothing was sent and the group stays usable."""


class UnsupportedError(UsageError):
    """A call that torch allows and detcomm refuses, since no order of additions is specified for it."""


class ScheduleError(DetcommError):
    """A schedule or a plan breaks its contract, or cannot implement the association asked for."""


class MismatchError(DetcommError):
    """The ranks of a group disagree. No output was written; the message names ranks and both values."""


class TransportError(DetcommError):
    """A peer is lost. Every rank of the group sees it, and the group is unusable afterwards."""


class PeerTimeoutError(TransportError):
    """A peer did not answer within the group's timeout."""


class NativeError(DetcommError):
    """The native library returned a failure status."""
