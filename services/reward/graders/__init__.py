"""Graders: from a candidate workspace to a reward with its reasons."""
