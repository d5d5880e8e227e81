"""Inference engines that the platform can start itself."""
