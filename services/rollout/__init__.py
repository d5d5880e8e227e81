"""The rollout service: turns tasks into trajectories."""
