"""The trainer's gRPC edge."""
