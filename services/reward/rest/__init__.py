"""The REST edge: grades, ad hoc grading, and what the sandbox enforces."""
