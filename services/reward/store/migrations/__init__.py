"""The history of the reward service's schema."""
