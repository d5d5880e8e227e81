"""Code generated from proto/practicum/v1; `make proto` writes it again."""
