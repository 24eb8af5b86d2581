"""Mend fleets of GPU servers over SSH, with proof and a way back."""

__version__ = "0.1.0"
