"""The reward service: sandboxes for episodes, and grades in clean ones."""
