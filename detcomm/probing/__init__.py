# SPDX-License-Identifier: Apache-2.0
"""Finds the order of additions of a reduction from outside, whatever library does it.

sizes.py        the experiment: for each pair of ranks, the size of the smallest subtree that holds both
tree.py         from those sizes to the tree
replay.py       the found trees, evaluated on random numbers under each model of precision
probe.py        all of it, for one collective, type and size
drawing.py      the trees as a picture
"""

from detcomm.probing.probe import Probed, Range, probe

__all__ = ["Probed", "Range", "probe"]
