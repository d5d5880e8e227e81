"""What the reward service knows for sure: the grades it gave."""

MIGRATIONS = "services.reward.store:migrations"
