# SPDX-License-Identifier: Apache-2.0
"""The release. The one place where it is written: packaging and the native build read it from here."""

__version__ = "0.1.0"
