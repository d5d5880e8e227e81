"""The trainer service: graded trajectories in, committed checkpoints out."""
