"""fitact in the trainers that people use; each module imports its trainer, so import the one that you have.

In `transformers` and `lightning` a `FitactCallback`, in `axolotl` a `FitactPlugin`, in `torchtitan` a `FitactAC`,
which stands in place of activation checkpointing.
"""
