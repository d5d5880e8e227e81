"""Task suites and model makers that the README and the demo use."""
