"""What tests of compiled code need."""

import shutil

import pytest

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
