"""REST plumbing: one shape of application, errors, pages and idempotency for every service."""
