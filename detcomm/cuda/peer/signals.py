# SPDX-License-Identifier: Apache-2.0
"""What one rank tells the peers of its block in the course of a plan, and what it waits for: counts, by peer.

Two counts for each ordered pair. *Ready*: one more step's messages lie where the receiver finds them. *Done*: one more
step's messages have been read, and the sender may write there again. Knows steps and spans of bytes, no operations.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from detcomm.cuda.native import CSignal
from detcomm.cuda.peer.layout import NUM_SLOTS, Layout
from detcomm.cuda.stream_order import Span

PUBLISH, RESOLVE = 1, 2
"""``dc_cuda_signal.flags``: our tensors' places go with the first *ready*; the peer's are taken with its first."""

Signals = dict[int, CSignal]
"""What one sync does, by peer."""


class Ledger:
    """What has been told and what is open.

    Args:
        ranks: of the block, ascending.
        layout: of this rank.
    """

    def __init__(self, ranks: Sequence[int], layout: Layout) -> None:
        self._ranks = list(ranks)
        self._layout = layout
        self._sent: defaultdict[int, list[int]] = defaultdict(list)  # by peer, the steps that were told to be ready
        self._met: set[int] = set()
        self._consumed: defaultdict[int, int] = defaultdict(int)
        self._unread: list[tuple[int, Span]] = []

    def exchange(self, step: int, senders: Sequence[int]) -> Signals:
        """All that a step sends is ready, and all that it receives is awaited."""
        receivers = self._layout.receivers(step)
        signals = {peer: self._signal(peer) for peer in sorted({*receivers, *senders})}
        for peer in receivers:
            signals[peer].ready = 1
            signals[peer].flags |= 0 if self._sent[peer] else PUBLISH
            self._sent[peer].append(step)
        for peer in senders:
            signals[peer].awaited = 1
            signals[peer].flags |= 0 if peer in self._met else RESOLVE
            self._met.add(peer)
        return signals

    def consume(self, peers: Sequence[int]) -> None:
        """A step's messages of these peers have been read; ``tell_done`` tells them."""
        for peer in peers:
            self._consumed[peer] += 1

    @property
    def owes(self) -> bool:
        """Whether a peer has not been told yet that its messages were read."""
        return bool(self._consumed)

    def tell_done(self, signals: Signals) -> None:
        """Tell what has been read since the last time."""
        for peer, count in self._consumed.items():
            signals.setdefault(peer, self._signal(peer)).done = count
        self._consumed.clear()

    def expose(self, step: int, span: Span) -> None:
        """From this step on peers read these bytes where they lie."""
        self._unread.append((step, span))

    def steps_read_in(self, writes: Sequence[Span]) -> list[int]:
        """The steps whose readers must be done before these bytes may be written."""
        touched = [step for step, span in self._unread if any(span.overlaps(write) for write in writes)]
        return sorted({step for step, _ in self._unread if step <= max(touched)}) if touched else []

    def free_next_slot(self, step: int, signals: Signals) -> list[Span]:
        """Wait until the slot has been read into which the next step stages that does; see ``wait_for``."""
        slots = self._layout.slot_of
        following = slots.get(step, len(slots)) + 1
        if NUM_SLOTS <= following < len(slots):
            return self.wait_for(next(old for old, number in slots.items() if number == following - NUM_SLOTS), signals)
        return []

    def wait_for(self, step: int, signals: Signals) -> list[Span]:
        """Wait until all that a step has sent has been read; and so all that was sent before to the same peers.

        Returns:
            What may be written behind this sync, and not before: from now on nobody else waits for its readers.
        """
        for peer in self._layout.receivers(step):
            signal = signals.setdefault(peer, self._signal(peer))
            most = self._later(step, peer)
            signal.most = most if signal.most < 0 else min(signal.most, most)
        read = [span for sent, span in self._unread if self._is_awaited(sent, signals)]
        self._unread = [(sent, span) for sent, span in self._unread if not self._is_awaited(sent, signals)]
        return read

    def end(self) -> Signals:
        """Tell and wait for all that is open."""
        signals: Signals = {}
        self.tell_done(signals)
        for peer in self._sent:
            signals.setdefault(peer, self._signal(peer)).most = 0
        return signals

    def _is_awaited(self, step: int, signals: Mapping[int, CSignal]) -> bool:
        """Whether these waits are enough for all receivers of a step."""
        receivers = self._layout.receivers(step)
        return all(peer in signals and 0 <= signals[peer].most <= self._later(step, peer) for peer in receivers)

    def _later(self, step: int, peer: int) -> int:
        return sum(sent > step for sent in self._sent[peer])

    def _signal(self, peer: int) -> CSignal:
        return CSignal(peer=self._ranks.index(peer), most=-1)
