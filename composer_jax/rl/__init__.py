"""Asynchronous group policy gradient; see README.md in this folder for the flow of data."""
