"""The mathematics of a step: pure functions on tensors, no Megatron, no I/O."""
