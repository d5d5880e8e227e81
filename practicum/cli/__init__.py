"""The `practicum` command: a client of the REST APIs, and the supervisor of a local stack."""
