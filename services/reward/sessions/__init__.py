"""Episodes' sessions: which are open, whose they are, and when they end."""
