"""Tests of `runtime/saving`."""
