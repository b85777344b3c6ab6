"""What tests of compiled code need."""

from __future__ import annotations

import shutil

import pytest

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
