"""gRPC edges of the rollout service: what it serves to the trainer, and what it asks of the others."""
