"""The consumer of the grading stream."""
