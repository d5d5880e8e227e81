"""REST edge: translate, call, translate back."""
