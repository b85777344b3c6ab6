"""The record of a fit and its JSON: everything read is validated, nothing that is read runs."""
