"""gRPC plumbing: one way to serve and one way to call."""
