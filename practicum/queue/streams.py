"""The names of the streams. Entries are `practicum.v1.Envelope` messages."""

GRADING = "practicum:v1:grading"
"""rollout -> reward: `GradeRequest`."""

EVENTS = "practicum:v1:events"
"""Facts that any service may follow: `TrajectoryGraded`, `StepCommitted`, `VersionPublished`, …"""


def trajectories(run_id: str) -> str:
    """reward -> trainer: graded `Trajectory` messages of one run."""
    return f"practicum:v1:trajectories:{run_id}"
