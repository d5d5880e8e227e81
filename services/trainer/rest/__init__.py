"""The trainer's REST edge: translate, call, translate back."""
