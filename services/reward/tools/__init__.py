"""The tools that a policy may call: their schemas, and how a call becomes work in a sandbox."""
