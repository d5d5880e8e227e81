"""The gRPC edge: translate, call, translate back."""
