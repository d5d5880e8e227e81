"""One episode: a policy, a sandbox and a chat form in a loop."""
