"""A small CPU engine that speaks the subset of SGLang's native HTTP API that Practicum uses.

The rooms, read downwards: `main` starts the HTTP server (`api`) and the worker thread (`batcher`), which runs
the `model` over the `slots` of running requests and draws with `sampling`.
"""
