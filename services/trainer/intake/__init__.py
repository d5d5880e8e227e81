"""Graded trajectories from the stream to complete groups: read, verify, quarantine, assemble."""
