"""Megatron-Core as the training backend."""
