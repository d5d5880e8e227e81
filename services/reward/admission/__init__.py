"""The checks that a task passes before it may be trained on."""
