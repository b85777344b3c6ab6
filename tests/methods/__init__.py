"""The methods of fitting."""
