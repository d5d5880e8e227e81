"""Which episodes run when: groups of runs under their staleness bound, evaluations, demonstrations."""
