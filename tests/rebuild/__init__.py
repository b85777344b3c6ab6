"""Tests of fitact/runtime/rebuild."""
