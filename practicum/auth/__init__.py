"""Who may call: scopes, callers' tokens hashed in a file, the services' own secret, one check for all."""
