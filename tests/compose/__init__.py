"""The deployment, run for real on a Docker engine: images, compose file, gateway, restarts."""
