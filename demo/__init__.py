# SPDX-License-Identifier: Apache-2.0
"""The same training, run several ways: which ways change the trained weights, with stock gloo and with detcomm."""
