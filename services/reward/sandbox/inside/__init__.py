"""What runs inside the sandbox: the warm fork server, one supervisor per session, and the test runners.

These modules are bound read-only into the sandbox and import the standard library and pytest only. The
service imports `frames` and `plain` from here, so that both ends of a channel share one definition; it
trusts nothing that comes back. No secret of the service is ever in this process tree.
"""
