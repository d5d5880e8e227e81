"""The engines: a client of SGLang's native API, the pool that routes to them, and weight updates."""
