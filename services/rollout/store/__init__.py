"""The rollout service's own tables, and one repository a subject. SQL is the truth; streams are transport."""
