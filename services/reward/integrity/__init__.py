"""What keeps a grade honest: the path policy, the separation of tests and code, the clean room."""
