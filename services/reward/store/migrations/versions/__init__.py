"""One module a change, oldest first."""
