# SPDX-License-Identifier: Apache-2.0
"""Exchanges through memory that the ranks of a block have mapped: folds and copies read the peers themselves.

    layout   where a rank leaves what it sends, so that each peer can tell without a word
    program  a plan made ready: what is staged, what is read where it lies, who tells whom when
    path     one group's memory, for each call: which segment, and what peers may read in place

The planner, the associations and the order of additions are those of every other transport. What is new is only where
an operand lies.
"""
